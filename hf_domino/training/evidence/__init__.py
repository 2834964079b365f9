"""What training shows of itself: evaluation, simulated acceptance, its card."""

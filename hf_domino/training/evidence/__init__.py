"""What training shows of itself: evaluation, walked acceptance, its card."""

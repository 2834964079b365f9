"""What a training reports: its metrics, the simulated acceptance length, and the drafter's card."""

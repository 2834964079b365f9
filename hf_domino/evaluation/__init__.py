"""Measure a pair: whether the drafter fits, what happens in a round, and how fast every method is."""

"""The configuration of a drafter, the fields that it takes from its target, and the registry of drafting methods."""

"""A drafter's configuration, what it takes from its target's, and the registry of methods."""

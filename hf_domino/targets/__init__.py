"""The target, whose output distribution is preserved: a view of it, its identity, and whether a drafter fits it."""

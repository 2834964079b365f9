"""The model whose output distribution is preserved: a view of it, which one it is, and whether a drafter fits it."""

"""The model whose output law is preserved: a view of it, which one it is, and whether a drafter can serve it."""

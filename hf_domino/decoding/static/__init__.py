"""Rounds of fixed shape, whose stages can run as CUDA graphs: the storage, and the workspace that captures them."""

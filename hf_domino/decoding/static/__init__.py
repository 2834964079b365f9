"""Rounds of fixed shape, whose stages can run as CUDA graphs: the storages, and the workspace that captures."""

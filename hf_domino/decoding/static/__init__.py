"""Rounds of fixed shape, whose stages can be CUDA graphs: the parts that take the place of those that grow."""

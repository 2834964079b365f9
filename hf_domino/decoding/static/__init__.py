"""Rounds of fixed shape, whose stages can run as CUDA graphs: the counterparts of the parts that grow."""

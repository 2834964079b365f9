"""Watching for drift: a share of assisted calls is replayed without speculation and compared."""

"""Entering Transformers: the one patch, the checks of a call of `generate`, the adapter for its own assisted loop."""

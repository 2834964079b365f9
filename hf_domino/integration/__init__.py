"""Integration with Transformers: the patch, the checks of a `generate` call, default drafters and grammars."""

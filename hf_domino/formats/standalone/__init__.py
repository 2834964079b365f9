"""This package's own source, rewritten as the flat files that `generate(..., custom_generate=...)` loads without it."""

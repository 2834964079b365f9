"""The version of the package, which `pyproject.toml` reads from this module."""

__version__ = "0.1.0"

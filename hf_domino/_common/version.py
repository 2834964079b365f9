"""The version of the package, which `pyproject.toml` reads here."""

__version__ = "0.1.0"

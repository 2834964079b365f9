"""Helpers that every package needs: errors, atomic writes, late imports, and the origin of a measurement."""

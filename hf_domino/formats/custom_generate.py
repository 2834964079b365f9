"""Write `custom_generate/generate.py` into a drafter's folder, for `generate(custom_generate=...)` of Transformers."""

from __future__ import annotations

from pathlib import Path

from hf_domino._common.atomic_writes import write_atomic

# Transformers looks for this file. It does not start if a package is missing, unless the import is in a `try`.
PLACE = Path("custom_generate", "generate.py")
CODE = '''\
"""Generate with the drafter of this repository: pip install hf-domino

>>> model.generate(**inputs, custom_generate="user/this-drafter", trust_remote_code=True)
"""

try:
    from hf_domino.integration.custom_generate import generate
except ImportError as error:
    raise ImportError("This drafter needs the package hf_domino. Install it with: pip install hf-domino") from error

__all__ = ["generate"]
'''


def write_custom_generate(folder: str | Path) -> Path:
    """Write the file into a drafter's folder, and return its path."""
    path = Path(folder) / PLACE
    write_atomic(path, CODE)
    return path

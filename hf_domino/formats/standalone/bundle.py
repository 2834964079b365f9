"""Write `custom_generate/`: every module that an assisted call needs, found by following imports from its entry."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import cast

from hf_domino.formats.standalone.imports import rewrite

FOLDER = "custom_generate"
ENTRY, ENTRY_FILE = "integration/custom_generate.py", "generate"  # read, never imported; what Transformers looks for
PACKAGES = ("hf_domino", "domino_kernels")
LICENCE = "Apache-2.0"
_ENTRY_NAME = f"{PACKAGES[0]}.{ENTRY.removesuffix('.py').replace('/', '.')}"
REQUIREMENTS = ("torch>=2.9", "transformers>=5.18,<6")  # Transformers checks them before it runs the code


def write_bundle(folder: str | Path) -> list[Path]:
    """Write the bundle into a drafter's folder, in place of an older one.

    Args:
        folder (`str` or `Path`): The drafter's; `custom_generate` is made in it.

    Returns:
        `list[Path]`: The files.

    Example:
    ```python
    >>> import tempfile
    >>> from hf_domino.formats.standalone.bundle import write_bundle
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     {"generate.py", "decoding_loop.py"} <= {path.name for path in write_bundle(folder)}
    True

    ```
    """
    place = Path(folder) / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}.py": text for name, text in bundle().items()} | {"requirements.txt": "\n".join(REQUIREMENTS)}
    for old in place.glob("*.py"):
        old.unlink()
    for name, text in texts.items():
        (place / name).write_text(text.rstrip() + "\n", encoding="utf-8")
    return [place / name for name in texts]


def bundle() -> dict[str, str]:
    """Names of the flat modules, and their text.

    Raises:
        ValueError: Without the package, as in a bundle.
    """
    if _path(_ENTRY_NAME) is None:
        raise ValueError("standalone=True needs the package, whose source is bundled: pip install hf-domino.")
    version = importlib.import_module(PACKAGES[0]).__version__
    texts: dict[str, str] = {}
    found, open_ = {_ENTRY_NAME: ENTRY_FILE}, [_ENTRY_NAME]
    while open_:
        name = open_.pop()
        path = cast(Path, _path(name))
        text, needed = rewrite(path.read_text(encoding="utf-8"), name, path.stem == "__init__", _flat)
        header = f"# {name}, hf_domino {version}, SPDX-License-Identifier: {LICENCE}; made from it: do not edit"
        texts[found[name]] = f"{header}\n{text}"
        for other in sorted(needed - found.keys()):
            if _named(other) in found.values():
                raise ValueError(f"{other} must have a name of its own in a flat folder, got {_named(other)}.py twice.")
            found[other] = _named(other)
            open_.append(other)
    return texts


def _flat(name: str) -> str | None:
    """The flat name of one of our modules; None of any other."""
    return None if _path(name) is None else _named(name)


def _named(name: str) -> str:
    return name.removeprefix(f"{PACKAGES[0]}.").replace(".", "_")


def _path(name: str) -> Path | None:
    """A module's file, without importing it."""
    top, *rest = name.split(".")
    spec = importlib.util.find_spec(top) if top in PACKAGES else None
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*rest)
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)

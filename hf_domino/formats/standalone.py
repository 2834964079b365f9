"""Bundle this package's own source as `custom_generate/`: flat files that Transformers runs without the package.

The bundle has every module that an assisted call needs, found by following imports from the entry point. Only imports
are rewritten. Transformers finds the files of a repository's code by reading their imports itself. It understands only
`from .name import x`, and looks a dotted name up as one file. It does not start if a package is missing, even one that
is only imported inside a function, unless the import is in a `try`.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from hf_domino._common.atomic_writes import atomic_writes
from hf_domino._common.errors import invalid_argument
from hf_domino._common.version import __version__
from hf_domino.configuration.domino_config import DominoConfig

FOLDER = "custom_generate"
# The entry point, which is read but never imported, and the name under which Transformers looks for it.
ENTRY = "integration/custom_generate.py"
ENTRY_FILE = "generate"
PACKAGES = ("hf_domino", "domino_kernels")
LICENCE = "Apache-2.0"
_ENTRY_NAME = f"{PACKAGES[0]}.{ENTRY.removesuffix('.py').replace('/', '.')}"
# Packages that Transformers itself needs.
NEEDED_ANYWAY = ("huggingface_hub", "numpy", "safetensors", "tokenizers", "torch", "transformers", "yaml")
NOT_ASKED_FOR = "optional: Transformers does not ask for it"
REQUIREMENTS = ("torch>=2.9", "transformers>=5.18,<6")  # Transformers checks them before it runs the code


def write_bundle(folder: str | Path) -> list[Path]:
    """Write the bundle into a drafter's folder, replacing an older one, and return its files.

    Example:
    ```python
    >>> import tempfile
    >>> from hf_domino.formats.standalone import write_bundle
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     {"generate.py", "decoding_loop.py"} <= {path.name for path in write_bundle(folder)}
    True

    ```
    """
    place = Path(folder) / FOLDER
    texts = {f"{name}.py": text for name, text in bundle().items()} | {"requirements.txt": "\n".join(REQUIREMENTS)}
    with atomic_writes(place, "*.py") as aside:
        for name, text in texts.items():
            (aside / name).write_text(text.rstrip() + "\n", encoding="utf-8")
    return [place / name for name in texts]


def check_bundled(config: DominoConfig) -> None:
    """Raise an error for a drafter that the bundle could not run.

    Args:
        config (`DominoConfig`): The drafter's configuration.

    Raises:
        ValueError: If its method is not part of this package, or the package is not installed.
    """
    if _path(_ENTRY_NAME) is None:
        raise ValueError("standalone=True needs the package, whose source is bundled: pip install hf-domino.")
    module = type(config).__module__
    if _path(module) is None:
        remedy = f"The bundle is this package's code, without {module}. Save it without standalone=True."
        allowed = "one of hf_domino with standalone=True"
        raise invalid_argument("the drafter's method", allowed, f"{config.title} ({config.projector_type})", remedy)


def bundle() -> dict[str, str]:
    """Return the texts of the flat modules by name."""
    texts: dict[str, str] = {}
    found = {_ENTRY_NAME: ENTRY_FILE}
    open_ = [_ENTRY_NAME]
    while open_:
        name = open_.pop()
        path = cast(Path, _path(name))
        text, needed = rewrite(
            path.read_text(encoding="utf-8"),
            name,
            path.stem == "__init__",
            lambda other: _named(other) if _path(other) else None,
        )
        header = f"# {name}, hf_domino {__version__}, SPDX-License-Identifier: {LICENCE}; made from it: do not edit"
        texts[found[name]] = f"{header}\n{text}"
        for other in sorted(needed - found.keys()):
            assert _named(other) not in found.values(), f"{other} has no name of its own in a flat folder"
            found[other] = _named(other)
            open_.append(other)
    return texts


def _named(name: str) -> str:
    return name.removeprefix(f"{PACKAGES[0]}.").replace(".", "_")


def _path(name: str) -> Path | None:
    """Return the file of one of our own modules, without importing it; None for any other module."""
    top, *rest = name.split(".")
    if top not in PACKAGES:
        return None
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        return None
    place = Path(spec.origin).parent.joinpath(*rest)
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


def rewrite(source: str, name: str, is_package: bool, flat_name: Callable[[str], str | None]) -> tuple[str, set[str]]:
    """Rewrite a module's imports for flat files; return its text and the names of our own modules that it needs."""
    package = name if is_package else name.rpartition(".")[0]
    lines = source.splitlines(keepends=True)
    needed = set()
    for node in sorted(_imports(ast.parse(source)), key=lambda node: -node.lineno):
        replaced: list[str] = []
        if not isinstance(node, ast.If):
            replaced, modules = _rewritten(node, package, flat_name)
            needed |= modules
        lines[node.lineno - 1 : node.end_lineno] = [f"{' ' * node.col_offset}{line}\n" for line in replaced]
    return "".join(lines), needed


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom | ast.If]:
    """Yield all import statements, and the blocks for type checkers, which are to be removed."""
    for node in ast.iter_child_nodes(tree):
        for_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse
        if for_checkers or isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node  # type: ignore[misc]
        else:
            yield from _imports(node)


def _rewritten(
    node: ast.Import | ast.ImportFrom, package: str, flat_name: Callable[[str], str | None]
) -> tuple[list[str], set[str]]:
    """Return the lines that replace an import, and the names of our own modules that it imports."""
    base = ""
    if isinstance(node, ast.ImportFrom):
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    lines = []
    needed = set()
    others = []
    for alias in node.names:
        module = f"{base}.{alias.name}" if base else alias.name
        if (flat := flat_name(module)) is None:
            others.append(ast.unparse(alias))
            continue
        needed.add(module)
        name = alias.asname or alias.name
        # The first line lets Transformers find the file.
        lines += [f"from .{flat} import __name__ as _", f"from . import {flat}{'' if flat == name else f' as {name}'}"]
    if others and (flat := flat_name(base)) is not None:
        needed.add(base)
        lines.append(f"from .{flat} import {', '.join(others)}")
    elif others:
        is_there = (base or others[0]).partition(".")[0] in (*sys.stdlib_module_names, *NEEDED_ANYWAY)
        line = ast.unparse(node)
        lines += [line] if is_there else [f"try:  # {NOT_ASKED_FOR}", f"    {line}", "finally:", "    pass"]
    return lines, needed

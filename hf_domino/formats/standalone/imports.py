"""The imports of one module, rewritten for a flat folder; every other character stays as it is.

Transformers finds the files of a repository's code by reading imports itself. It takes `from .name import x` and no
other form, looks a dotted name up as one file, and refuses to start where a package is missing, also one that is only
imported inside a function, unless the import stands in a `try`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator

# What Transformers needs itself.
NEEDED_ANYWAY = ("huggingface_hub", "numpy", "safetensors", "tokenizers", "torch", "transformers", "yaml")


def rewrite(source: str, name: str, is_package: bool, flat_name: Callable[[str], str | None]) -> tuple[str, set[str]]:
    """Rewrite the imports of a module.

    Args:
        source (`str`): Its text.
        name (`str`): Its dotted name.
        is_package (`bool`): Whether it is a package's `__init__`.
        flat_name (`Callable`): The file that a dotted name is bundled as; None for what is no module of ours.

    Returns:
        `tuple`: The text, and the dotted names of the modules that it needs.

    Raises:
        ValueError: For an import that cannot stand in a flat folder.
    """
    package = name if is_package else name.rpartition(".")[0]
    lines, needed = source.splitlines(keepends=True), set()
    for node in sorted(_imports(ast.parse(source)), key=lambda node: -node.lineno):
        indent = " " * node.col_offset
        if isinstance(node, ast.If):
            replaced: list[str] = []
        elif isinstance(node, ast.ImportFrom):
            replaced, names = _from_import(node, package, flat_name)
            needed |= names
        else:
            replaced, names = _import(node, flat_name)
            needed |= names
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}\n" for line in replaced]
    return "".join(lines), needed


def _imports(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom | ast.If]:
    """Import statements anywhere, and blocks for type checkers, which go."""
    for node in ast.iter_child_nodes(tree):
        for_checkers = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse
        if for_checkers or isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node  # type: ignore[misc]
        else:
            yield from _imports(node)


def _from_import(
    node: ast.ImportFrom, package: str, flat_name: Callable[[str], str | None]
) -> tuple[list[str], set[str]]:
    parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
    base = ".".join(filter(None, (parent, node.module)))
    lines, needed, names = [], set(), []
    for alias in node.names:
        module = f"{base}.{alias.name}"
        if (flat := flat_name(module)) is not None:
            needed.add(module)
            lines += _module(flat, alias.asname or alias.name)
        else:
            names.append(ast.unparse(alias))
    if (flat := flat_name(base)) is None:
        return _elsewhere(node, base), set()
    if names:
        needed.add(base)
        lines.append(f"from .{flat} import {', '.join(names)}")
    return lines, needed


def _import(node: ast.Import, flat_name: Callable[[str], str | None]) -> tuple[list[str], set[str]]:
    lines, needed = [], set()
    for alias in node.names:
        flat = flat_name(alias.name)
        if flat is None:
            lines += _elsewhere(ast.Import([alias]), alias.name)
        elif alias.asname is None and "." in alias.name:
            raise ValueError(f"import {alias.name} must have a name of its own: write import {alias.name} as ...")
        else:
            needed.add(alias.name)
            lines += _module(flat, alias.asname or alias.name)
    return lines, needed


def _module(flat: str, name: str) -> list[str]:
    """A module itself: the first line is the one by which Transformers finds its file."""
    rename = "" if flat == name else f" as {name}"
    return [f"from .{flat} import __name__ as _", f"from . import {flat}{rename}"]


def _elsewhere(node: ast.Import | ast.ImportFrom, module: str) -> list[str]:
    statement = ast.unparse(node)
    if module.partition(".")[0] in (*sys.stdlib_module_names, *NEEDED_ANYWAY):
        return [statement]
    return ["try:  # not asked for where it is not installed", f"    {statement}", "finally:", "    pass"]

"""Print how much code the package holds, and how that changed since yesterday. Nothing is asserted: size is reported.

python .ci/size.py
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
import tokenize
from collections import Counter
from pathlib import PurePath

FOLDERS = ("hf_domino", "kernels/torch-ext")
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def size_of(source: str) -> Counter[str]:
    """Count the lines, functions, classes and tokens of a module; comments and docstrings are no tokens."""
    nodes = list(ast.walk(ast.parse(source)))
    documented = [node for node in nodes if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None]
    docstrings = {node.body[0].lineno for node in documented}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = [each for each in tokens if each.type not in NO_CODE and each.start[0] not in docstrings]
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    sizes = {"modules": 1, "lines": source.count("\n"), "functions": len(functions), "classes": len(classes)}
    return Counter(sizes | {"tokens": len(code)})


def size_at(commit: str) -> Counter[str]:
    """Count the package at a commit."""
    packed = subprocess.run(["git", "archive", commit, *FOLDERS], capture_output=True, check=True).stdout
    total: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if PurePath(member.name).suffix == ".py" and (file := archive.extractfile(member)) is not None:
                total += size_of(file.read().decode())
    return total


def main() -> None:
    """Print a line for each measure."""
    words = ["git", "rev-list", "-1", "--before=1 day ago", "HEAD"]
    before = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    now = size_at("HEAD")
    then = size_at(before) if before else now
    for name, value in now.items():
        print(f"{name}: {value:,} ({value - then[name]:+,} since yesterday)")


if __name__ == "__main__":
    main()

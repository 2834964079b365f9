"""Pages, cards, notebooks, `--help`, docstrings and comments use the field's words, not those of earlier versions."""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pytest

from hf_domino.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[1]
GONE = {  # what a reader would not know, and what it is called now
    r"\bkinds? of drafters?\b|\bdrafters? of (?:any|another|other|a|this|that) kind\b|\bthe drafter's kind\b": "method",
    r"\b(?:token|draft|target's) laws?\b|\bthe law\b": "distribution",
    r"\bwith(?:out)? copies\b|\brounds? (?:may )?cop(?:y|ies|ied)\b": "prompt lookup",
    r"\bcop(?:y|ies|ied)\b[^.]{0,30}\bfrom the text\b": "prompt lookup",
    r"\brac(?:e|es|ed|ing)\b": "sample",
    r"\blanes?\b": "branch",
    r"\bpartings?\b|\bparted\b|\btexts? parts?\b": "divergence, to diverge",
    r"\btwins?\b": "baseline, or reference of a kernel",
    r"\bwhole files?\b": "atomic write",
    r"\bwhole blocks\b": "full blocks",
    r"\bbrought\b": "emitted, gained",
    r"\bsingle steps?\b": "plain decode step",
    r"\b(?:is|are|was|were) walked\b": "simulated",
    r"\buntold\b|\bsieves?\b": "filter, drop reason",
}
# Code and computed names may hold old words: kernels' functions, files of rows, fields of statistics and of rows.
NAMES = re.compile(r"```.*?```|`[^`]*`|<!--.*?-->|\]\([^)]*\)|\[[\w.-]+\.jsonl\]", re.DOTALL)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("model_cards/*/README.md")])
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))


def old_words(text: str) -> list[str]:
    """Every word of `text` that is gone, with the word to use."""
    plain = " ".join(NAMES.sub(" ", text).split())
    return [f"{found[0]!r} is {new!r} now" for old, new in GONE.items() for found in re.finditer(old, plain, re.I)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_pages_use_the_words_of_the_field(page):
    assert old_words(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_use_the_words_of_the_field(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    markdown = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    assert old_words("\n\n".join(markdown)) == []


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_uses_the_words_of_the_field(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"] if command else ["--help"])
    assert old_words(capsys.readouterr().out) == []


def docstrings_and_comments(path):
    """What a module says to its reader."""
    source = path.read_text(encoding="utf-8")
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    comments = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    return "\n".join([*filter(None, map(ast.get_docstring, nodes)), *comments])


@pytest.mark.parametrize("package", ["hf_domino", "kernels/torch-ext/domino_kernels"])
def test_modules_use_the_words_of_the_field(package):
    found = {path.name: old_words(docstrings_and_comments(path)) for path in (ROOT / package).rglob("*.py")}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "text",
    [
        "This kind of drafter",
        "a round brought two",
        "rounds copied them",
        "the DFlash twin, on whole\nblocks",
        "the law",
    ],
)
def test_old_words_are_found(text):
    assert old_words(text)


def test_names_in_code_are_left_alone():
    assert old_words("`num_single_steps` and `twin` in [rows](kinds-twin.jsonl)\n\n```python\nlanes = 2\n```\n") == []

"""How the documentation is built: `sphinx-build -W docs build/docs`. Pages are Markdown, the reference docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hf_domino

project, author, copyright = "hf_domino", "the hf_domino authors", "the hf_domino authors"
version = release = hf_domino.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme, html_title = "furo", f"hf_domino {release}"
root_doc = "reference"  # holds what only Sphinx reads; `index.md` is a page like the others
# Links out of this folder, which tests/test_docstrings.py follows, and the flowchart, which GitHub draws.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]
myst_heading_anchors, myst_enable_extensions = 3, ["deflist"]
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True
autodoc_typehints, autodoc_member_order = "none", "bysource"  # docstrings name types, in Hugging Face's grammar
default_role = "code"

FENCE = re.compile(r"^\s*```(python)?$")
LINK = re.compile(r"\[`~?([^`]+)`\]")  # Hugging Face's [`Name`], [`~module.Name`]


def setup(app: Any) -> None:
    """Read docstrings as they are written: Markdown in the grammar of Hugging Face."""
    app.connect("autodoc-process-docstring", _to_rst, priority=400)  # before napoleon


def _to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Take the fences off examples, which have prompts, and the brackets off links."""
    lines[:] = ["" if FENCE.match(line) else LINK.sub(r"`\1`", line) for line in lines]


assert Path(hf_domino.__file__).parents[1] == Path(__file__).parents[1], "another hf_domino is installed"

"""Every example runs: in docstrings, the README and the documentation. Links between files lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import domino_kernels
import hf_domino
from hf_domino.pair import BUNDLED

ROOT = Path(__file__).parents[1]
BUNDLED_DRAFTER = ROOT / "model_cards" / f"{BUNDLED}-domino" / "config.json"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SHOWN = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^print\(.*\n((?:#.*\n)+)", re.MULTILINE)  # below a print stands what it prints, as a comment
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED_EXAMPLE = re.compile(r"^ *```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PACKAGES = hf_domino, domino_kernels
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
# Each goes on from the quickstart.
PAGES = [f"docs/{name}.md" for name in ("quickstart", "training", "serving", "exactness", "speed")]
# One prompt in place of a dozen: what is printed of them stands on no page.
QUICK = {"check_fit(drafter, target, tokenizer)": "check_fit(drafter, target, tokenizer, [prompt], 8)"}
NAMES = [
    name
    for package in PACKAGES
    for name in (
        package.__name__,
        *(found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")),
    )
]


@pytest.mark.parametrize("name", NAMES)
def test_docstring_examples(name):
    if ".triton_" in name:
        pytest.importorskip("triton")
    if ".vllm_" in name:
        pytest.importorskip("vllm")
    module = importlib.import_module(name)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module):
        results = doctest.DocTestRunner(optionflags=FLAGS).run(example)
        assert results.failed == 0, f"{example.name}: see the output above"


def test_fenced_examples_have_prompts():
    for path in (path for package in PACKAGES for path in Path(package.__file__).parent.rglob("*.py")):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, documented)]
        for example in FENCED_EXAMPLE.findall("\n".join(ast.get_docstring(node) or "" for node in nodes)):
            assert ">>> " in example, f"{path.name}: without >>> the example is never run"


@pytest.mark.skipif(not BUNDLED_DRAFTER.exists(), reason="the bundled pair is not in this checkout")
@pytest.mark.parametrize("pages", [["README.md"], PAGES], ids=["README", "docs"])
def test_examples_of_pages(pages, monkeypatch, capsys, tmp_path):
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    monkeypatch.chdir(tmp_path)  # an example saves what it has trained
    scope: dict[str, object] = {}
    for page in pages:
        for block in PYTHON_BLOCK.findall((ROOT / page).read_text()):
            if "import xgrammar" in block and find_spec("xgrammar") is None:  # no part of an environment made earlier
                continue
            for slow, quick in QUICK.items():
                block = block.replace(slow, quick)
            exec(compile(block, page, "exec"), scope)  # one scope: later blocks go on from earlier ones
    printed = capsys.readouterr().out
    assert printed
    for page in pages:
        text = (ROOT / page).read_text()
        comments = [re.sub("^# ?", "", comment, flags=re.MULTILINE) for comment in PRINTED.findall(text)]
        assert all(block in printed for block in [*SHOWN.findall(text), *comments]), page


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("[dkm]*/**/*.md")), ids=lambda path: path.name
)
def test_links_between_files(page):
    for link in LINK.findall(page.read_text()):
        name, _, anchor = link.partition("#")
        linked = (page.parent / name) if name else page
        assert linked.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
            }, link

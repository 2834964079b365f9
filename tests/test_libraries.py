"""The snippets of the page of other libraries: each drafts, and every text is that of the target alone."""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationMixin

import hf_domino
from hf_domino.pair import BUNDLED

ROOT = Path(__file__).parents[1]
SETUP, *SNIPPETS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/libraries.md").read_text(), re.M | re.S)
LIGHT = {"hf_domino", "transformers", "accelerate", "torchao", "peft"}  # what development installs


def libraries(snippet):
    """The packages that a snippet imports, the library that it is about first."""
    nodes = [node for node in ast.walk(ast.parse(snippet)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [getattr(node, "module", None) or node.names[0].name for node in nodes]
    return [name.partition(".")[0] for name in names if name.partition(".")[0] not in sys.stdlib_module_names]


def parameter(snippet):
    used = libraries(snippet)
    heavy = [name for name in used if name not in LIGHT]
    about = next((name for name in used if name not in ("hf_domino", "transformers", "datasets")), "transformers")
    return pytest.param(snippet, id=about, marks=pytest.mark.slow if heavy else ())


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Folders by the names of the page, in the working folder."""
    if not (ROOT / "model_cards" / f"{BUNDLED}-domino").exists():
        pytest.skip("the bundled pair is not in this checkout")
    shutil.copytree(ROOT / "model_cards" / BUNDLED, tmp_path / "my-target")
    shutil.copytree(ROOT / "model_cards" / f"{BUNDLED}-domino", tmp_path / "my-drafter")
    (tmp_path / "my-target" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content if message.content is string else message.content[0].text }}\n"
        "{% endfor %}"
    )
    rows = [{"text": text} for text in ("def median(values):\n", "class Stack:\n", "import os\n")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)


TASK = {  # of lm-evaluation-harness, in place of one that is downloaded
    "task": "continuations",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": "rows.jsonl"},
    "test_split": "train",
    "output_type": "generate_until",
    "doc_to_text": "{{text}}",
    "doc_to_target": "pass",
    "generation_kwargs": {"until": ["\n\n\n"], "max_gen_toks": 32, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.mark.parametrize("snippet", [parameter(snippet) for snippet in SNIPPETS])
def test_texts_are_those_of_the_target_alone(snippet, models, monkeypatch):
    for name in libraries(snippet):
        pytest.importorskip(name)
    generate, attach = GenerationMixin.generate, hf_domino.attach
    written, attached = [], []

    @functools.wraps(generate)
    def recorded(*args, **kwargs):
        output = generate(*args, **kwargs)
        written.append(getattr(output, "sequences", output).tolist())
        return output

    def note(target, drafter):
        attach(target, drafter)
        attached.append(hf_domino.attached(target))

    def texts(attach):
        """All that was generated."""
        monkeypatch.setattr(hf_domino, "attach", attach)
        monkeypatch.setattr(hf_domino.trl, "attach", attach)
        written.clear()
        torch.manual_seed(3)
        scope = {"tasks": [TASK]}
        for block in (SETUP, snippet):
            exec(compile(block, "docs/libraries.md", "exec"), scope)
        return list(written)

    monkeypatch.setattr(GenerationMixin, "generate", recorded)
    with hf_domino.plain():
        plain = texts(note)
    attached.clear()
    assert texts(note) == plain != []
    assert sum(default.num_drafted for default in attached) == len(plain)
    assert [default.num_plain for default in attached] == [{}] * len(attached)

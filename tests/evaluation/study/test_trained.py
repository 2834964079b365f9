"""What anchors brought: of a study's own runs without changes, and of the cards of drafters trained from nothing."""

from __future__ import annotations

import json
import re
import shutil
import statistics

import pytest

from hf_domino.evaluation.study.trained import trained_here
from hf_domino.pair import BUNDLED, find_pair

CARDS = find_pair().parent


@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_of_the_checkout(kind):
    expected = {}
    for file in CARDS.glob("*/study.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        lengths = [row["acceptance_length"] for row in rows if (row["variant"], row["budget"]) == (kind, "default")]
        if lengths:
            expected[f"study of {rows[0]['target']}, {len(lengths)} seeds"] = statistics.mean(lengths)
    studies = [each for each in trained_here(kind) if each.name.startswith("study")]
    assert {each.name: each.acceptance_length for each in studies} == pytest.approx(expected)
    assert len(studies) == len(expected)
    assert f"study of {BUNDLED}, 3 seeds" in expected
    card = (CARDS / f"pycoder-13m-{kind}" / "README.md").read_text()
    (bundled,) = (each for each in trained_here(kind) if each.name == f"pycoder-13m-{kind}")
    assert f"| {bundled.acceptance_length:.4g} |\n\nShare of proposals" in card
    steps = int(re.search(r"\| steps \| ([\d,]+) \|", card)[1].replace(",", ""))
    assert bundled.anchors % steps == 0


def test_further_trainings_and_other_kinds_are_left_out(tmp_path):
    assert "smollm2-135m-instruct-domino" not in [each.name for each in trained_here("domino")]  # trained in two parts
    folder = tmp_path / "mine"
    shutil.copytree(CARDS / "pycoder-13m-dflash", folder, ignore=shutil.ignore_patterns("*.safetensors", "*.jsonl"))
    (tmp_path / "note.txt").write_text("no drafter")
    (mine,) = trained_here("dflash", tmp_path)
    assert mine.name == "mine"
    assert trained_here("domino", tmp_path) == []
    card = folder / "README.md"
    card.write_text(card.read_text().replace("| lambda_base_start | 1 |", "| lambda_base_start | 0.3 |"))
    assert trained_here("dflash", tmp_path) == []
    card.write_text("# A card of another hand")
    assert trained_here("dflash", tmp_path) == []

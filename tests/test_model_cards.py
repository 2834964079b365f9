"""The bundled models' cards, computed again: from configurations, the recipe and the committed rows."""

from __future__ import annotations

import re
import shutil
from itertools import product
from pathlib import Path
from statistics import mean

import pytest
from huggingface_hub import metadata_load

from hf_domino.cards.sections import read_sections
from hf_domino.evaluation.benchmark.summary import summarize
from hf_domino.evaluation.results import read_results
from hf_domino.pair import BUNDLED
from hf_domino.publishing.folder_card import card_for
from recipes.cards import write_cards

CARDS = Path(__file__).parents[1] / "model_cards"
NAMES = [BUNDLED, f"{BUNDLED}-domino", f"{BUNDLED}-dflash"]
DRAFTERS = [*NAMES[1:], "qwen2.5-coder-0.5b-instruct-domino", "smollm2-135m-instruct-domino"]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WEIGHTS = ("*.safetensors", "README.md")

pytestmark = pytest.mark.skipif(not (CARDS / NAMES[1]).exists(), reason="the bundled pair is not in this checkout")


def test_cards_are_what_recipe_and_rows_give(tmp_path):
    for name in NAMES:
        # A drafter's card needs its weights, which show that the results are its own.
        ignored = WEIGHTS if name == BUNDLED else WEIGHTS[1:]
        shutil.copytree(CARDS / name, tmp_path / name, ignore=shutil.ignore_patterns(*ignored))
    write_cards(tmp_path / BUNDLED, tmp_path / "work")
    for name in NAMES:
        assert (tmp_path / name / "README.md").read_text() == (CARDS / name / "README.md").read_text()


@pytest.mark.parametrize("name", DRAFTERS)
def test_cards_can_be_pushed(name):
    assert card_for(CARDS / name) == (CARDS / name / "README.md").read_text()
    head = metadata_load(CARDS / name / "README.md")
    assert (head["library_name"], head["license"]) == ("hf_domino", "apache-2.0")
    rows = (CARDS / name / "results.jsonl").is_file()
    assert "pipeline_tag" not in head
    assert ("model-index" in head) is rows
    assert ("results" in read_sections((CARDS / name / "README.md").read_text())) is rows


@pytest.mark.parametrize("name", NAMES)
def test_snippets_run(name, monkeypatch, capsys):
    monkeypatch.chdir(CARDS)
    scope: dict[str, object] = {}
    blocks = PYTHON_BLOCK.findall((CARDS / name / "README.md").read_text())
    for block in blocks:
        exec(compile(block, name, "exec"), scope)
    assert blocks
    if name != BUNDLED:
        assert "acceptance length" in capsys.readouterr().out


def test_pictures_are_those_of_the_documentation():
    pictures = {path.name: path for path in (CARDS / NAMES[1] / "figures").glob("*.svg")}
    assert {"acceptance.svg", "speed-up.svg"} <= pictures.keys()
    for name, path in pictures.items():
        if name != "training.svg":  # of the run that made it, nowhere else
            assert path.read_bytes() == (CARDS.parent / "docs" / "benchmark" / path.name).read_bytes()
        assert f"](figures/{path.name})" in (CARDS / NAMES[1] / "README.md").read_text()


def test_rows_in_the_repository_are_small():
    sizes = [path.stat().st_size for path in CARDS.glob("*/*.jsonl")]
    assert 0 < max(sizes) < 2**20
    assert all(read_results(path) for path in CARDS.glob("*/*.jsonl") if path.name != "prompts.jsonl")


def test_a_smaller_draft_vocabulary_accepts_as_much_in_half_the_time():
    small, whole = (
        summarize(read_results(CARDS / DRAFTERS[-1] / "vocabulary" / f"{size}.jsonl"), "domino", "greedy")
        for size in (8192, 49152)
    )
    assert small.acceptance_length == pytest.approx(whole.acceptance_length, abs=0.02)
    assert small.ms_per_round["correction"] == pytest.approx(whole.ms_per_round["correction"] / 2, rel=0.1)


@pytest.mark.parametrize("name", [NAMES[1], DRAFTERS[-1]])
def test_a_served_drafter_writes_the_same_texts_in_as_many_rounds(name):
    rows = read_results(CARDS / name / "serving.jsonl")
    assert {(row["equal_to_transformers"], row["texts"], row["dtype"]) for row in rows} == {(50, 50, "float32")}
    ours, *served = (row["rounds"] for row in rows if row["rounds"])
    assert served == pytest.approx([ours, ours], rel=0.01)


def test_a_compiled_server_writes_the_same_texts_as_its_rows_say():
    rows = read_results(CARDS / DRAFTERS[-1] / "serving-compiled.jsonl")
    assert {(row["equal_to_transformers"], row["texts"], row["dtype"]) for row in rows} == {(5, 5, "float32")}
    assert not any("--enforce-eager" in row["flags"] for row in rows)


def test_the_table_of_a_servers_speed_is_that_of_its_rows():
    page = (CARDS.parent / "docs" / "serving.md").read_text()
    rows = read_results(CARDS / NAMES[1] / "serving-speed.jsonl")
    served = [row for row in rows if row.method.endswith("with the drafter")]
    assert {(row["dtype"], row["at_once"]) for row in served} == set(product(("float32", "bfloat16"), (1, 4, 8)))
    for dtype, at_once in product(("float32", "bfloat16"), (1, 4, 8)):
        alike = [row for row in rows if (row["dtype"], row["at_once"]) == (dtype, at_once)]
        alone, drafted = (
            mean(row["tokens_per_second"] for row in alike if row.method == f"vLLM 0.32.0{name}")
            for name in ("", " with the drafter")
        )
        assert f"| {dtype} | {at_once} | {alone:.0f} | {drafted:.0f} | {drafted / alone:.2f} x |" in page


def test_the_fault_of_norms_is_that_of_its_rows():
    rows = read_results(CARDS / NAMES[2] / "serving-shift-label-false.jsonl")
    ours, mended, stock = (row["rounds"] for row in rows if row["rounds"])
    assert mended == ours
    page = " ".join((CARDS.parent / "tests" / "serving" / "vllm_faults.md").read_text().split())
    assert f"needed {stock} rounds for 20 texts of 64 tokens, and {mended} with the norms mended" in page


def test_what_more_training_brought_is_what_its_rows_say():
    page = " ".join((CARDS / "workshop" / "study" / "README.md").read_text().split())
    rows = read_results(CARDS / DRAFTERS[-1] / "going-on.jsonl")
    steps = sum(row["steps"] for row in rows)
    length = rows[-1]["eval_walked_acceptance_length"]
    assert f"Another {steps:,} steps raised this to [{length:.2f}]" in page
    times_read = rows[-1]["steps"] * rows[-1]["rows_per_step"] / int(rows[-1]["rows"].split()[0])
    assert f"the last {rows[-1]['steps']:,} read the same text {times_read:.0f} times" in page
    rows = read_results(CARDS / DRAFTERS[-1] / "going-on-gpu.jsonl")
    steps, seconds = (sum(row[name] for row in rows) for name in ("steps", "train_runtime"))
    length = rows[-1]["eval_walked_acceptance_length"]
    said = (
        f"{steps:,} steps with convolutions, {seconds / 60:.0f} minutes on an H200, raised it from 1.60 to {length:.2f}"
    )
    assert said in page


def test_rows_are_of_commits():
    texts = [path.read_text() for path in CARDS.glob("*/*.jsonl")]
    assert [text for text in texts if '-dirty"' in text] == []

"""The pages say what the rows do."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import measured
import pytest

import tables
from hf_domino.cards.sections import read_sections
from hf_domino.evaluation.benchmark.report import number
from hf_domino.evaluation.benchmark.summary import speed_ratio, summarize
from hf_domino.evaluation.results import Result, read_results, to_lines

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "model_cards/workshop/study/README.md"]
ROWS = [replace(row, method="domino_adaptive") if row.method == "domino" else row for row in measured.rows()]


def test_a_line_is_what_the_rows_give(tmp_path):
    (tmp_path / "rows.jsonl").write_text(to_lines(ROWS))
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- speed:begin rows.jsonl -->\n<!-- speed:end -->\n<!-- gain:begin rows.jsonl -->\n<!-- gain:end -->\n"
    )
    text = tables.filled(page)
    greedy, sampled = (speed_ratio(ROWS, "domino_adaptive", "plain", mode) for mode in ("greedy", "sample"))
    said = f"On average, tiny in float32 on 2 threads of a CPU is **{greedy[0]:.1f} times as fast** on own prompts"
    assert f"{said} (Domino)." in text
    cells = (f"{mean:.2f} x ({low:.2f}\u2013{high:.2f})" for mean, low, high in (greedy, sampled))
    assert f"| **Domino** | {' | '.join(cells)} |" in text
    assert "| tiny in float32, 2 threads of a CPU | own prompts, greedy |" in text


def of_engine(method, speed, weights):
    """A row of an engine outside Transformers."""
    row = measured.row(method, 0, [speed])
    settings = {name: value for name, value in row.settings.items() if name != "dtype"} | {"weights": weights}
    return replace(row, settings=settings, figures=row.figures | {"peak_memory": 2**30})


def of_another_prompt(row):
    return replace(row, settings=row.settings | {"sources": [["module", 1, "other hash"]]})


def test_other_engines_stand_beside_ours_and_the_page_says_who_is_ahead(tmp_path):
    ours = [measured.row("plain", 0, [4.0]), measured.row("packed", 0, [5.0]), measured.row("domino_lookup", 0, [8.0])]
    faster = of_engine("llama.cpp, n-grams", 12.0, "tiny-q4_k_m.gguf")
    (tmp_path / "results-edits.jsonl").write_text(
        to_lines([*ours, of_another_prompt(measured.row("packed", 1, [9.0]))])
    )
    (tmp_path / "other-engines-edits.jsonl").write_text(
        to_lines([faster, of_engine("OpenVINO GenAI", 6.0, "tiny-fp16")])
    )
    said = tables.engines(tmp_path, ["results-edits.jsonl", "other-engines-edits.jsonl"])
    assert said.splitlines()[:7] == [
        "| tokens a second, 2 threads of a CPU | edits |",
        "|---|---:|",
        "| plain generate (float32) | 4 |",
        "| plain, packed (float32) | 5 |",
        "| Domino with prompt lookup (float32) | 8 |",
        "| llama.cpp, n-grams (Q4_K_M) | 12 |",
        "| OpenVINO GenAI (fp16) | 6 |",
    ]
    assert "- The fastest of ours, over the fastest of **llama.cpp**: 0.67 times as fast on edits." in said
    assert "- The fastest of ours, over the fastest of **OpenVINO GenAI**: 1.33 times as fast on edits." in said
    assert "Q4_K_M, fp16, 2 threads of a CPU, at most 1.0 GiB of memory" in said


def test_engines_are_compared_on_the_prompts_that_all_have_or_not_at_all(tmp_path):
    (tmp_path / "results-edits.jsonl").write_text(to_lines([measured.row("plain", 0, [4.0])]))
    other = of_another_prompt(of_engine("llama.cpp", 9.0, "tiny-q4_k_m.gguf"))
    (tmp_path / "other-engines-edits.jsonl").write_text(to_lines([other]))
    with pytest.raises(ValueError, match="no prompt of edits is in all of"):
        tables.engines(tmp_path, ["results-edits.jsonl", "other-engines-edits.jsonl"])


def test_each_processor_and_dtype_has_its_place_and_the_dtype_of_files_is_the_first(tmp_path):
    target = "qwen2.5-coder-0.5b-instruct"
    settings = [("float32", "Intel(R) Xeon(R) Processor"), ("bfloat16", "AMD EPYC 7B13 64-Core Processor")]
    for dtype, hardware in settings:
        about = {"target": target, "dtype": dtype}
        rows = [
            replace(row, settings={**row.settings, **about}, provenance={**row.provenance, "hardware": hardware})
            for row in ROWS
        ]
        (tmp_path / f"{dtype}.jsonl").write_text(to_lines(rows))
    files = ["float32.jsonl", "bfloat16.jsonl"]
    said = tables.gain(tmp_path, files)
    heads = [line.split(" | ")[0] for line in said.splitlines() if line.startswith(f"| {target}")]
    assert heads == [
        f"| {target} in bfloat16, 2 threads of AMD EPYC 7B13",
        f"| {target} in float32, 2 threads of Intel Xeon",
    ]
    assert said.count(f"The weights of {target} were de-quantised from the official Q4_K_M file.") == 2
    lines = [line.split(" | ")[0] for line in tables.methods(tmp_path, files).splitlines() if line.startswith("| ")]
    assert lines == [
        f"| {target}",
        "| own prompts, greedy, bfloat16, 2 threads of AMD EPYC 7B13",
        "| own prompts, T = 0.7, bfloat16, 2 threads of AMD EPYC 7B13",
        "| own prompts, greedy, float32, 2 threads of Intel Xeon",
        "| own prompts, T = 0.7, float32, 2 threads of Intel Xeon",
    ]


def test_what_a_recipe_took_is_the_sum_of_its_runs(tmp_path):
    (tmp_path / "rows.jsonl").write_text(to_lines(ROWS))
    took = [("target", 1.5), ("data", 2.0), ("data", 0.25)]  # the second broke off
    stages = [Result(stage, figures={"cpu_minutes": minutes}) for stage, minutes in took]
    (tmp_path / "stages.jsonl").write_text(to_lines(stages))
    page = tmp_path / "page.md"
    page.write_text("<!-- recipe:begin stages.jsonl rows.jsonl -->\n<!-- recipe:end -->\n")
    text = tables.filled(page)
    assert "CPU-minutes: target 1.5, data 2.2; together 3.8." in text
    assert f"Domino {number(summarize(ROWS, 'domino_adaptive', 'greedy').tokens_per_forward)}" in text


def test_speeds_on_a_gpu_are_those_of_long_texts(tmp_path):
    settings = {"target": "tiny", "dtype": "float32", "max_new_tokens": 64, "temperature": 0.7}
    provenance = {"hardware": "NVIDIA A", "commit": "0123456789", "date": "2026-11-26"}
    speeds = {"plain": 10, "plain, static": 100, "drafter, static, full blocks": 150}
    rows = [
        Result(
            method,
            settings | {"mode": mode, "prompt": prompt},
            {"new_tokens": 64, "tokens_per_second": speed, "equals_plain": True},
            provenance,
        )
        for (method, speed), mode, prompt in itertools.product(speeds.items(), ("greedy", "sample"), range(3))
    ]
    rows[1] |= {"new_tokens": 12, "tokens_per_second": 12}  # of the second prompt, greedy
    (tmp_path / "rows.jsonl").write_text(to_lines(rows))
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- {name}:begin rows.jsonl -->\n<!-- {name}:end -->\n" for name in ("gpu",)))
    text = tables.filled(page)
    assert "| plain | 10 (0.10) | 10 (0.10) |" in text
    assert "| drafter, static, full blocks | 150 (1.50) | 150 (1.50) |" in text
    assert "| prompts | 2 | 3 |" in text


def test_trainings_of_a_drafter_are_shown_at_their_best_rate(tmp_path):
    settings = {"budget": "tiny", "steps": 160, "target": "tiny", "num_texts": 8, "seed": 0}
    provenance = {"hardware": "a core", "commit": "0123456789", "date": "2026-11-27"}
    found = {"before": (2.0, 0.0), "adapter": (2.5, 1e-3), "adapter_rate_1": (3.0, 2e-3), "whole": (3.5, 1e-3)}
    rows = [
        Result(
            name,
            settings | {"changes": {"learning_rate": rate}},
            {
                "acceptance_length": length,
                "acceptance_error": 0.1,
                "saved_bytes": 2**21 if "adapter" in name else 2**24,
            },
            provenance,
        )
        for name, (length, rate) in found.items()
    ]
    (tmp_path / "rows.jsonl").write_text(to_lines(rows))
    study = ROOT / "model_cards" / "workshop" / "study" / "adapter.yaml"
    (tmp_path / "study.yaml").write_text(study.read_text())
    page = tmp_path / "page.md"
    page.write_text("<!-- trained:begin study.yaml rows.jsonl tiny -->\n<!-- trained:end -->\n")
    lines = tables.filled(page).splitlines()
    assert lines[3:6] == [
        "| The drafter as it was (`before`) | 2.00 ± 0.10 |  |  |",
        "| LoRA of rank 16 on every linear layer (`adapter`) | 3.00 ± 0.10 | 160 | 2.0 MB |",
        "| All weights trained (`whole`) | 3.50 ± 0.10 | 160 | 16.0 MB |",
    ]


@pytest.mark.skipif(not (ROOT / "model_cards").exists(), reason="no rows are published in this checkout")
@pytest.mark.parametrize(
    "name", [path.relative_to(ROOT).as_posix() for path in PAGES if tables.MARKERS.search(path.read_text())]
)
def test_the_pages_say_what_the_rows_do(name):
    assert tables.filled(ROOT / name) == (ROOT / name).read_text()


@pytest.mark.skipif(not (ROOT / "model_cards").exists(), reason="no rows are published in this checkout")
def test_what_training_took_is_what_the_cards_say():
    card = read_sections((ROOT / "model_cards" / "pycoder-13m-domino" / "README.md").read_text())["training"]
    minutes = 60 * float(re.search(r"^\| hours \| ([\d.]+) \|$", card, re.MULTILINE)[1])
    further = ROOT / "model_cards" / "smollm2-135m-instruct-domino" / "going-on-gpu.jsonl"
    rows = read_results(further)
    steps, seconds = (sum(row[name] for row in rows) for name in ("steps", "train_runtime"))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"Training the bundled drafter took {minutes:.0f} minutes on two CPU cores" in text
    last = (
        f"the last {steps:,} of {3520 + steps:,} steps of SmolLM2's drafter took {seconds / 60:.0f} minutes on an H200"
    )
    assert last in text

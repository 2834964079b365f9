from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import measured
import pytest
from measured import PROVENANCE, SETTINGS, row

from hf_domino.evaluation.benchmark.report import (
    caption,
    comparisons,
    conclusion,
    results_table,
)
from hf_domino.evaluation.benchmark.summary import summarize
from hf_domino.evaluation.results import read_results
from hf_domino.pair import BUNDLED

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "model_cards" / f"{BUNDLED}-domino" / "results.jsonl"

MEASURED = [(190, [2]), (200, [4, 6, 8]), (900, [3])]  # tokens/s and rounds of each prompt
ROWS = [row("plain", prompt, [speed]) for prompt, speed in enumerate([90, 100, 140])]
ROWS += [row("domino", prompt, [speed], lengths) for prompt, (speed, lengths) in enumerate(MEASURED)]

ALL = measured.rows()
PLACE = " in float32 on 2 threads of a CPU"  # which every conclusion names


def test_summaries_take_medians_over_prompts_and_means_over_rounds():
    summary = summarize(ROWS, "domino", "greedy")
    assert summary.tokens_per_second == 200
    assert summary.speed_up == pytest.approx(
        (190 / 90 * 200 / 100 * 900 / 140) ** (1 / 3)
    )  # as README's tables have it
    assert summary.acceptance_length == pytest.approx((2 + 4 + 6 + 8 + 3) / 5)
    assert (summary.num_equal, summary.num_prompts) == (3, 3)
    summary = summarize(measured.rows(), "domino", "sample")
    assert summary.speed_up == pytest.approx(2.0)
    assert summary.quartiles == pytest.approx((185, 245))  # of 180 180 200 200 260 260
    assert summary.acceptance_rate_at == pytest.approx([1, 2 / 3, 1 / 3])
    assert summary.acceptance_length == pytest.approx(1 + sum(summary.acceptance_rate_at))  # docs/gpu.md
    assert summary.ms_per_round == pytest.approx(measured.PHASES_MS)


@pytest.mark.parametrize(("factors", "low", "high"), [([1.2, 1.0] * 5, "1.02", "1.17"), ([1.2, 1.0], "0.00", "inf")])
def test_trees_and_chains_are_compared_on_equal_prompts(factors, low, high):
    rows = [row("plain", prompt, [100]) for prompt in range(len(factors))]
    for prompt, factor in enumerate(factors):
        rows += [row("Domino, chains", prompt, [100 * (1 + prompt)], [3, 1])]
        rows += [row("Domino, trees", prompt, [100 * (1 + prompt) * factor], [3, 2])]
    found = f"1.10 x (95 %: {low} to {high}) tokens/s, 2.50 over 2.00 tokens per forward, {len(factors)} equal prompts."
    assert comparisons(rows) == [f"greedy: Domino, trees over Domino, chains {found}"]
    assert comparisons(ALL) == []


def test_single_steps_are_told_from_drafted_rounds():
    told = {"num_drafted": 2, "acceptance_length": 3.0, "tokens_per_forward": 2.0, "acceptance_rate_at": [1.0, 1.0]}
    rows = [
        measured.row("plain", 0, [1]),
        measured.row("domino", 0, [1], [3, 3, 1, 1]) | told,
        measured.row("domino", 1, [1], [6]),
    ]
    summary = summarize(rows, "domino", "greedy")
    assert summary.acceptance_length == pytest.approx((2 * 3 + 6) / 3)
    assert summary.tokens_per_forward == pytest.approx((4 * 2 + 6) / 5)
    assert summary.acceptance_rate_at == pytest.approx([1, 1, 1 / 3, 1 / 3, 1 / 3])
    assert "| 4.00 (2.80) |" in results_table(rows)
    assert "in brackets, tokens per forward" in results_table(rows)
    assert "in brackets" not in results_table(measured.rows())


@pytest.mark.parametrize(
    ("speeds", "sentence"),
    [
        (
            {"domino_adaptive": [200, 180]},
            "Faster than plain: 1.90 x with Domino, slower than plain in 0 of 2 prompts.",
        ),
        (
            {"domino_adaptive": [96, 50], "domino_lookup": [150, 99]},
            "Faster than plain: 1.22 x with Domino with prompt lookup, slower than plain in 1 of 2 prompts, and 0.69 x "
            "without prompt lookup.",
        ),
        (
            {"domino_adaptive": [80, 80], "prompt_lookup": [130, 130]},
            "Slower than plain: 0.80 x with Domino, slower than plain in 2 of 2 prompts; use prompt lookup without a "
            "drafter, 1.30 x.",
        ),
        (
            {"domino_adaptive": [99, 101], "prompt_lookup": [70, 70]},
            "About as fast as plain: 1.00 x with Domino, slower than plain in 1 of 2 prompts; generate without it "
            "here, or train it on until its rounds bring more tokens.",
        ),
        (  # of the drafter, whatever else was measured
            {"domino_adaptive": [80, 80], "recycling": [120, 120], "dflash_adaptive": [150, 150]},
            "Slower than plain: 0.80 x with Domino, slower than plain in 2 of 2 prompts; generate without it here, or "
            "train it on until its rounds bring more tokens.",
        ),
        (
            {"domino_lookup": [150, 150], "prompt_lookup": [180, 180]},
            "Faster than plain: 1.50 x with Domino with prompt lookup, slower than plain in 0 of 2 prompts; use prompt "
            "lookup without a drafter, 1.80 x.",
        ),
        (  # which cannot be trained
            {"prompt_lookup": [90, 90], "recycling": [80, 80]},
            "Slower than plain: 0.80 x with token recycling, slower than plain in 2 of 2 prompts; generate without it "
            "here.",
        ),
        ({}, ""),
    ],
)
def test_a_benchmark_ends_with_what_came_of_it(speeds, sentence):
    speeds = {"plain": [100, 100]} | speeds
    rows = [row(method, at, [one], [2] * 16) for method in speeds for at, one in enumerate(speeds[method])]
    assert conclusion(rows).replace(PLACE, "") == sentence
    assert (PLACE in conclusion(rows)) == bool(sentence)


@pytest.mark.parametrize(
    ("lengths", "load", "sentence"),
    [
        ([7] * 4, 0.5, "Inconclusive: 8 forwards with Domino are too few to time; generate more tokens."),
        (
            [7] * 16,
            2.0,
            "Slower than plain: 0.80 x with Domino, slower than plain in 2 of 2 prompts; other programs kept the "
            "machine busy (load 2.0 per core), so measure again when it is idle.",
        ),
    ],
)
def test_a_drafter_is_not_blamed_for_what_the_machine_does(lengths, load, sentence):
    speeds = {"plain": 100, "domino_adaptive": 80}
    rows = [row(name, at, [speed], lengths) | {"load": load} for name, speed in speeds.items() for at in range(2)]
    assert conclusion(rows).replace(PLACE, "") == sentence
    assert PLACE in conclusion(rows)


def test_table_shows_differences_honestly_and_misses_no_rows():
    with pytest.raises(ValueError, match="method='dflash'"):
        summarize(ROWS, "dflash", "greedy")
    rows = [*ROWS[:-1], row("domino", 2, [900], [3], equal=False)]
    assert "plain `generate`: 2 of 3" in results_table(rows)


def test_table_has_spread_speed_up_and_notes():
    lines = results_table(measured.rows()).splitlines()
    assert len({line.count("|") for line in lines[:5]}) == 1
    assert lines[4].startswith("| Domino, full blocks | 200 (185-245) | 2.00 x | 3.00 |")
    assert "Not measured: DFlash baseline, full blocks (there is no DFlash baseline)." in lines[6]
    assert "Distinct 4-grams of plain text: 0.80 greedy, 0.80 T = 0.7." in lines[6]


def test_threads_are_of_a_cpu_only():
    on_gpu = [
        replace(one, settings=one.settings | {"device": "cuda"}, provenance=one.provenance | {"hardware": "a GPU"})
        for one in measured.rows()
    ]
    assert "2 threads of a CPU" in results_table(measured.rows())
    assert "float32, a GPU. " in results_table(on_gpu)


@pytest.mark.skipif(not PUBLISHED.exists(), reason="no rows are published in this checkout")
def test_published_rows_say_where_they_come_from():
    for published in read_results(PUBLISHED):
        assert published.settings.keys() >= SETTINGS.keys()
        assert all(published[field] is not None for field in (*SETTINGS, *PROVENANCE))


def test_the_caption_counts_equal_outputs_by_what_is_promised():
    assert "Sampled" not in caption(measured.rows(["greedy"]))
    assert "assistants" not in caption([one for one in ALL if one["method"] != "prompt_lookup"])

    def doctored(change):
        return caption([one | {"equals_plain": change(one)} if one.get("mode") == "sample" else one for one in ALL])

    said = "with the same seed: {} of 2; with Transformers' own assistants {} of 2."
    assert said.format(2, 2) in doctored(lambda one: True)
    assert said.format(1, 1) in doctored(lambda one: one["prompt"] == 0)

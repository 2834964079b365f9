"""Render the published tables from measured results, so that no number is typed by hand."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from hf_domino._common.fields import BUNDLED_PROMPTS
from hf_domino._common.verdict import STOP, WAY_OUT, gains, slower_in, verdict, why_busy
from hf_domino.evaluation.benchmark.options import (
    BASELINE,
    COLUMNS,
    FIRST_TOKEN,
    LOOKUP,
    METHODS,
    PEAK_MEMORY,
    WITH_LOOKUP,
    keeps_seed,
)
from hf_domino.evaluation.benchmark.summary import (
    Summary,
    are_ties,
    count_equal,
    rows_of,
    speed_ratio,
    speed_ups_of,
    summarize,
)
from hf_domino.evaluation.results import Result, measured

SCALES = {FIRST_TOKEN: 1e3, PEAK_MEMORY: 2**-30}  # from seconds and bytes to the units of the columns


def label(method: str) -> str:
    """Return a method's name in tables."""
    return METHODS.get(method, method)


def modes_of(rows: Sequence[Result]) -> dict[str, str]:
    """Return the modes that were measured, and the name of each in tables."""
    return {"greedy": "greedy"} | {
        row["mode"]: f"T = {row['temperature']}" for row in rows_of(rows, BASELINE, "sample")
    }


def methods_of(rows: Sequence[Result]) -> list[str]:
    """Return the methods that were measured: those of `METHODS` in its order, then the others."""
    found = {row["method"]: None for row in measured(rows)}
    return list({method: None for method in METHODS if method in found} | found)


def plain_label(method: str) -> str:
    """Return a method's name without Markdown."""
    return re.sub("[*`]", "", label(method))


def place_of(row: Result) -> str:
    """Return what computed a result: a GPU, or a processor and the number of threads on it."""
    name = " ".join(re.sub(r"\((?:R|TM)\)|\b(?:Processor|\d+-Core)\b|(?:CPU )?@.*", " ", row["hardware"]).split())
    if row.get("device", "cpu") != "cpu" or name.startswith("NVIDIA"):
        return name
    return f"{_count(row['threads'], 'thread')} of {name}"


def results_table(rows: Sequence[Result]) -> str:
    """Render the published table as Markdown, with a caption that says where and how it was measured."""
    first = measured(rows)[0]
    table = speeds_table(rows, modes_of(rows), f"{first['dtype']}, {place_of(first)}")
    return f"{table}\n{caption(rows)}\n"


def speeds_table(rows: Sequence[Result], modes: Mapping[str, str], corner: str = "") -> str:
    """Render tokens per second, speed-up and acceptance length of every method in these modes as Markdown."""
    asked = [column for column in COLUMNS if any(column in row for row in rows)]
    columns = ["tokens/s", "speed-up", "acceptance length", *(COLUMNS[column] for column in asked)]
    heads = [f"{name}, {what}" for name in modes.values() for what in columns]
    body = []
    for method in methods_of(rows):
        cells = [label(method)]
        for one in (summarize(rows, method, mode) for mode in modes):
            speed = f"{one.tokens_per_second:.0f} ({one.quartiles[0]:.0f}-{one.quartiles[1]:.0f})"
            cells += [speed, number(one.speed_up, " x"), acceptance_of(one)]
            cells += [number(getattr(one, column), scale=SCALES[column]) for column in asked]
        body.append(cells)
    return markdown_table(heads, body, corner)


def acceptance_of(summary: Summary) -> str:
    """Return the acceptance length, followed by the tokens per forward if some rounds were plain decode steps."""
    length = number(summary.acceptance_length)
    per_forward = number(summary.tokens_per_forward)
    if length == per_forward:
        return length
    return f"{length} ({per_forward})"


def comparisons(rows: Sequence[Result]) -> list[str]:
    """Compare every other drafter with the first one, or trees with chains, in one sentence for each mode."""
    drafters = [method for method in methods_of(rows) if method not in METHODS]
    pairs = [(other, drafters[0]) for other in drafters[1:]]
    said = []
    for (mode, name), pair in itertools.product(modes_of(rows).items(), pairs):
        found = [summarize(rows, method, mode) for method in pair]
        ratio, low, high = speed_ratio(rows, *pair, mode)
        tokens = " over ".join(number(one.tokens_per_forward) for one in found)
        said.append(
            f"{name}: {' over '.join(map(label, pair))} {ratio:.2f} x (95 %: {low:.2f} to {high:.2f}) tokens/s, "
            f"{tokens} tokens per forward, {_count(found[0].num_prompts, 'equal prompt')}."
        )
    return said


def conclusion(rows: Sequence[Result]) -> str:
    """Say in one sentence whether the fastest drafter beats plain greedy generation; empty if nothing else was run."""
    others = [method for method in methods_of(rows) if method != BASELINE]
    speed_ups = {method: summarize(rows, method, "greedy").speed_up for method in others}
    if not speed_ups:
        return ""
    trained = [method for method in others if method.split(", ")[0] not in METHODS or method.startswith("domino")]
    best = max(trained or set(others) - {LOOKUP} or others, key=speed_ups.__getitem__)
    counted = slower_in(speed_ups_of(rows, best, BASELINE, "greedy"))
    alone = speed_ups.get("domino_adaptive")
    if best == WITH_LOOKUP and alone:
        counted += f", and {alone:.2f} x without prompt lookup"
    lookup = speed_ups.get(LOOKUP, 0.0)
    note = ""
    if gains(lookup) and gains(lookup / speed_ups[best]):
        note = f"use prompt lookup without a drafter, {lookup:.2f} x"
    if loads := [row["load"] for row in measured(rows) if row.get("load") is not None]:
        note = why_busy(statistics.median(loads)) or note
    num_forwards = sum(row["num_rounds"] for row in rows_of(rows, best, "greedy"))
    way_out = WAY_OUT if best in trained else STOP
    first = measured(rows)[0]
    who = f"{plain_label(best)} in {first['dtype']} on {place_of(first)}"
    return verdict(speed_ups[best], who, counted, way_out, note, num_forwards)


def number(value: float | None, unit: str = "", scale: float = 1.0) -> str:
    """Format a number for a table; None gives an empty cell."""
    return "" if value is None else f"{value * scale:.2f}{unit}"


def markdown_table(heads: Sequence[str], body: Iterable[Sequence[str]], corner: str = "") -> str:
    """Return a table whose first column holds the names of its lines; `corner` is the head of that column."""
    first = f"| {corner} |" if corner else "| |"
    lines = [f"{first} {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)]) + "\n"


def caption(rows: Sequence[Result]) -> str:
    """Describe the machine, the texts, the number of equal outputs, and what was not measured, in one paragraph."""
    first = measured(rows)[0]
    plain = rows_of(rows, BASELINE, "greedy")
    sources = [source for row in plain for source in row["sources"]]
    noun = "prompt"
    if first.get("prompts") == BUNDLED_PROMPTS:
        noun = "bundled prompt"
    elif all(module for module, *_ in sources):
        noun = "held-out prompt"
    prompts = _count(len(sources), noun)
    written = sum(row["new_tokens"] for row in plain) / max(len(sources), 1)
    tokens = f"{first['max_new_tokens']} new tokens"
    if written != first["max_new_tokens"]:
        tokens = f"up to {tokens} (plain, greedy: {written:.0f} on average)"
    commit = re.sub("^([0-9a-f]{7}).*", r"\1", first["commit"])
    return (
        f"{first['target']}, {prompts} x {tokens}, batch {first['batch_size']}, "
        f"{first['dtype']}, {place_of(first)}. All methods ran in turn in one process. Speeds are medians over "
        f"{_count(first['repeats'], 'run')} per prompt, then over prompts, with quartiles. A speed-up is "
        "the geometric mean over prompts of the speed over plain's. "
        f"{_equality(rows)}{_notes(rows)} "
        f"torch {first['torch']}, transformers {first['transformers']}, commit {commit}, "
        f"seed {first['seed']}, {first['date']}."
    )


def _equality(rows: Sequence[Result]) -> str:
    """Report how many greedy and sampled outputs equal those of plain generation."""
    others = [row for row in measured(rows) if row["method"] != BASELINE]
    greedy, sampled = ([row for row in others if row["mode"] == mode] for mode in ("greedy", "sample"))
    kept, lost = ([row for row in sampled if keeps_seed(row["method"]) is keeps] for keeps in (True, False))
    text = f"Greedy outputs equal to those of plain `generate`: {_equal(greedy)}."
    if sampled:
        text += f" Sampled outputs, with the same seed: {_equal(kept)}"
        if lost:
            text += f"; with Transformers' own assistants {_equal(lost)}"
        text += "."
    return text + _divergences(others)


def _equal(rows: Sequence[Result]) -> str:
    return f"{count_equal(rows)} of {len(rows)}"


def _divergences(rows: Sequence[Result]) -> str:
    """Report the margins at which texts diverge from those of plain generation, if the results have them."""
    diverged = [row for row in rows if row.get("divergences")]
    if not diverged:
        return ""
    margins = [at["margin"] for row in diverged for at in row["divergences"] if at["margin"] is not None]
    spread = ""
    if margins:
        spread = f" (margins of the logits up to {max(margins):.2g}, median {statistics.median(margins):.2g})"
    return (
        f" Of hf_domino's differences examined, {sum(map(are_ties, diverged))} of {len(diverged)} are at a tie "
        f"within the rounding of {diverged[0]['dtype']}{spread}."
    )


def _notes(rows: Sequence[Result]) -> str:
    """Report how repetitive the text is, and which methods were not measured."""
    ratios = [f"{summarize(rows, BASELINE, mode).distinct_4gram:.2f} {name}" for mode, name in modes_of(rows).items()]
    notes = f" Distinct 4-grams of plain text: {', '.join(ratios)}."
    summaries = [summarize(rows, method, mode) for method in methods_of(rows) for mode in modes_of(rows)]
    if any("(" in acceptance_of(one) for one in summaries):
        notes += " Acceptance lengths are means of the rounds that drafted; in brackets, tokens per forward."
    skipped = [f"{plain_label(row['method'])} ({row['skipped']})" for row in rows if "skipped" in row]
    if skipped:
        notes += f" Not measured: {'; '.join(skipped)}."
    return notes


def _count(number: int, noun: str) -> str:
    if number != 1:
        noun += "s"
    return f"{number} {noun}"

"""From measured rows to the tables that are published: no figure is typed by hand."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from hf_domino._common.verdict import WAY_OUT, gains, slower_in, verdict
from hf_domino.evaluation.benchmark.options import BASELINE, COPIES, METHODS, WITH_COPIES, keeps_seed
from hf_domino.evaluation.benchmark.rows import Row, measured
from hf_domino.evaluation.benchmark.summary import (
    Summary,
    are_ties,
    count_equal,
    rows_of,
    speed_ratio,
    speed_ups_of,
    summarize,
)


def label(method: str) -> str:
    """A method's name in tables."""
    return METHODS.get(method, method)


def modes_of(rows: Sequence[Row]) -> dict[str, str]:
    """The modes that were measured, each with its name in tables."""
    return {"greedy": "greedy"} | {
        row["mode"]: f"T = {row['temperature']}" for row in rows_of(rows, BASELINE, "sample")
    }


def methods_of(rows: Sequence[Row]) -> list[str]:
    """The methods that were measured, in the order of `METHODS`; others follow."""
    found = {row["method"]: None for row in measured(rows)}
    return list({method: None for method in METHODS if method in found} | found)


def plain_label(method: str) -> str:
    """A method's name without Markdown."""
    return re.sub("[*`]", "", label(method))


def results_table(rows: Sequence[Row]) -> str:
    """Render the published table as Markdown, with a caption that says where and how it was measured."""
    return f"{speeds_table(rows, modes_of(rows))}\n{caption(rows)}\n"


def speeds_table(rows: Sequence[Row], modes: Mapping[str, str]) -> str:
    """Render tokens a second, speed-ups and acceptance length of every method in these modes as Markdown."""
    heads = [f"{name}, {what}" for name in modes.values() for what in ("tokens/s", "speed-up", "acceptance length")]
    body = []
    for method in methods_of(rows):
        cells = [label(method)]
        for one in (summarize(rows, method, mode) for mode in modes):
            speed = f"{one.tokens_per_second:.0f} ({one.quartiles[0]:.0f}-{one.quartiles[1]:.0f})"
            cells += [speed, number(one.speed_up, " x"), acceptance_of(one)]
        body.append(cells)
    return markdown_table(heads, body)


def acceptance_of(summary: Summary) -> str:
    """Acceptance length, and where single steps were among the rounds the tokens per forward behind it."""
    length, per_forward = number(summary.acceptance_length), number(summary.tokens_per_forward)
    return length if length == per_forward else f"{length} ({per_forward})"


def comparisons(rows: Sequence[Row]) -> list[str]:
    """Say of each mode how every further drafter, or its trees, compares with the first, or its chains."""
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


def conclusion(rows: Sequence[Row]) -> str:
    """Say in one sentence whether the fastest drafter beats plain generation, greedy; empty where there was none."""
    others = [method for method in methods_of(rows) if method != BASELINE]
    speed_ups = {method: summarize(rows, method, "greedy").speed_up for method in others}
    if not speed_ups:
        return ""
    drafters = [method for method in others if method not in METHODS or method.startswith("domino")]
    best = max(drafters or set(others) - {COPIES} or others, key=speed_ups.__getitem__)
    counted = slower_in(speed_ups_of(rows, best, BASELINE, "greedy"))
    if best == WITH_COPIES and (alone := speed_ups.get("domino_adaptive")):
        counted += f", and {alone:.2f} x without copies"
    copies = speed_ups.get(COPIES, 0.0)
    way_out = f"use prompt lookup without a drafter, {copies:.2f} x" if gains(copies) else WAY_OUT
    return verdict(speed_ups[best], plain_label(best), counted, way_out)


def number(value: float | None, unit: str = "") -> str:
    """A figure in a table; empty where there is none."""
    return "" if value is None else f"{value:.2f}{unit}"


def markdown_table(heads: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table whose first column names its lines."""
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in body)]) + "\n"


def caption(rows: Sequence[Row]) -> str:
    """Tell in one paragraph the machine and texts of the rows, the number of equal outputs, and what is missing."""
    first = measured(rows)[0]
    plain = rows_of(rows, BASELINE, "greedy")
    sources = [source for row in plain for source in row["sources"]]
    prompts = _count(len(sources), "held-out prompt" if all(module for module, *_ in sources) else "prompt")
    written = sum(row["new_tokens"] for row in plain) / max(len(sources), 1)
    most = f"{first['max_new_tokens']} new tokens"
    tokens = most if written == first["max_new_tokens"] else f"up to {most} (plain, greedy: {written:.0f} on average)"
    commit = re.sub("^([0-9a-f]{7}).*", r"\1", first["commit"])
    is_on_cpu = first["device"] == "cpu"
    place = f"{_count(first['threads'], 'thread')} of {first['hardware']}" if is_on_cpu else first["hardware"]
    return (
        f"{first['pair']}, {prompts} x {tokens}, batch {first['batch_size']}, "
        f"{first['dtype']}, {place}; all methods interleaved in one process, median of "
        f"{_count(first['repeats'], 'repeat')} a prompt, then over prompts, quartiles over both; speed-up over plain. "
        f"{_equality(rows)}{_notes(rows)} "
        f"torch {first['torch']}, transformers {first['transformers']}, commit {commit}, "
        f"seed {first['seed']}, {first['date']}."
    )


def _equality(rows: Sequence[Row]) -> str:
    """Count the outputs that are plain generation's: greedy ones, and sampled ones by the promise of their methods."""
    others = [row for row in measured(rows) if row["method"] != BASELINE]
    greedy, sampled = ([row for row in others if row["mode"] == mode] for mode in ("greedy", "sample"))
    kept, lost = ([row for row in sampled if keeps_seed(row["method"]) is keeps] for keeps in (True, False))
    text = f"Greedy outputs equal to plain `generate`: {_equal(greedy)}."
    text += f" Sampled ones, with the same seed: {_equal(kept)}" if sampled else ""
    text += f"; by Transformers' own assistants {_equal(lost)}" if lost else ""
    return f"{text}{'.' if sampled else ''}{_partings(others)}"


def _equal(rows: Sequence[Row]) -> str:
    return f"{count_equal(rows)} of {len(rows)}"


def _partings(rows: Sequence[Row]) -> str:
    """Tell the margins of texts that part from plain generation's, where rows have them."""
    parted = [row for row in rows if row.get("partings")]
    if not parted:
        return ""
    margins = [at["margin"] for row in parted for at in row["partings"] if at["margin"] is not None]
    spread = (
        f": margins of its logits up to {max(margins):.2g}, median {statistics.median(margins):.2g}" if margins else ""
    )
    return (
        f" Of ours that differ, {sum(map(are_ties, parted))} of {len(parted)} part from it at a tie within what "
        f"{parted[0]['dtype']} rounds{spread}."
    )


def _notes(rows: Sequence[Row]) -> str:
    """Tell whether the text loops, and which methods were not measured."""
    ratios = [f"{summarize(rows, BASELINE, mode).distinct_4gram:.2f} {name}" for mode, name in modes_of(rows).items()]
    notes = f" Distinct 4-grams of plain text: {', '.join(ratios)}."
    summaries = [summarize(rows, method, mode) for method in methods_of(rows) for mode in modes_of(rows)]
    if any("(" in acceptance_of(one) for one in summaries):
        notes += " Acceptance length is of rounds that drafted; in brackets, tokens per forward."
    skipped = [f"{plain_label(row['method'])} ({row['skipped']})" for row in rows if "skipped" in row]
    return notes + (f" Not measured: {'; '.join(skipped)}." if skipped else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

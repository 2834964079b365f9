"""From the rows of a study to what is said of them: no figure is typed by hand."""

from __future__ import annotations

from collections.abc import Sequence

from hf_domino.evaluation.benchmark.report import markdown_table, number
from hf_domino.evaluation.results import Result
from study.plan import Run, Study
from study.summary import Difference, Summary, summarize

HEADS = ("acceptance length", "over", "above at", "base loss", "corrected loss", "parameters", "training, CPU s")
MINUS = "\N{MINUS SIGN}"


def results(study: Study, rows: Sequence[Result]) -> str:
    """Render the comparison with the baselines, the clear differences, the table and its caption as Markdown."""
    summaries = summarize(study, rows)
    said = [*_baselines(study, summaries), *_verdicts(summaries)]
    body = [[f"`{summary.variant}`: {summary.question}", *_cells(summary)] for summary in summaries]
    return "".join(f"- {line}\n" for line in said) + f"\n{markdown_table(HEADS, body)}\n{caption(rows)}\n"


def _baselines(study: Study, summaries: Sequence[Summary]) -> list[str]:
    """How often each Domino variant is above its DFlash baseline, and by how much."""
    lines = []
    for summary in summaries:
        difference = summary.difference
        if difference and _kind_of(study, summary.variant) == "dflash" != _kind_of(study, difference.against):
            below = difference.seeds - difference.above
            times = f"{1 / difference.ratio:.2f} x the acceptance length"
            seeds = f"above it at {below} of {difference.seeds} seeds"
            lines.append(f"`{difference.against}` has {times} of its baseline `{summary.variant}`, {seeds}.")
    return lines


def _kind_of(study: Study, variant: str) -> str | None:
    return (study.base | study.variants[variant].changes).get("projector_type")


def _verdicts(summaries: Sequence[Summary]) -> list[str]:
    """Group the variants by whether they differ clearly from what they are compared with."""
    found = [(summary.variant, summary.difference) for summary in summaries if summary.difference]
    verdicts = {
        "Clearly better": [pair for pair in found if pair[1].is_clear and pair[1].mean > 0],
        "Clearly worse": [pair for pair in found if pair[1].is_clear and pair[1].mean < 0],
        "No clear difference": [pair for pair in found if pair[1].error is not None and not pair[1].is_clear],
    }
    lines = []
    for verdict, pairs in verdicts.items():
        if pairs:
            ordered = sorted(pairs, key=lambda pair: -abs(pair[1].mean))
            lines.append(f"{verdict}: {', '.join(f'`{name}` ({signed(pair.mean)})' for name, pair in ordered)}.")
    return lines


def signed(value: float) -> str:
    """A difference, with a minus sign that is as wide as a plus."""
    return f"{value:+.2f}".replace("-", MINUS)


def _cells(summary: Summary) -> list[str]:
    figures = summary.figures
    length = number(summary.acceptance_length)
    if len(summary.seeds) > 1:
        length += f" ({summary.low:.2f} to {summary.high:.2f})"
    return [
        length,
        *_compared(summary.difference),
        number(figures["base_loss"]),
        number(figures["corrected_loss"]),
        f"{figures['parameters'] / 1e6:.2f} M",
        f"{figures['cpu_seconds']:.0f}",
    ]


def _compared(difference: Difference | None) -> tuple[str, str]:
    if difference is None:
        return "", ""
    error = "" if difference.error is None else f" ± {difference.error:.2f}"
    over = f"`{difference.against}`: {signed(difference.mean)}{error}"
    return over, f"{difference.above} of {difference.seeds}"


def caption(rows: Sequence[Result]) -> str:
    """Say what the rows were measured on, and how."""
    first, base = rows[0], rows[0]["base"]
    rounds = [row["num_rounds"] for row in rows]
    each = f"{first['steps']} steps x {base['per_device_train_batch_size']} examples x {base['num_anchors']} anchors"
    if efforts := {row.method: row["changes"]["effort"] for row in rows if "effort" in row["changes"]}:
        each += f" ({', '.join(f'`{variant}`: {effort} x the steps' for variant, effort in efforts.items())})"
    return (
        f"Budget `{first['budget']}`: {len(rows)} runs of {each}, for {first['target']}. Acceptance lengths are means "
        f"of {min(rounds)} to {max(rounds)} greedy rounds over {first['num_texts']} held-out texts, in brackets the "
        "lowest and highest seed. ± is the difference that chance explains in 95 of 100 cases, estimated from the "
        "scatter over seeds. Losses are cross-entropies with held-out text, whatever loss was trained, weighted along "
        "a block by the variant's `loss_decay`. "
        f"{_all(rows, 'hardware')}, {_all(rows, 'threads')} thread a run, torch {_all(rows, 'torch')}, transformers "
        f"{_all(rows, 'transformers')}, commit {', '.join(dict.fromkeys(row['commit'][:7] for row in rows))}, "
        f"{_all(rows, 'date')}."
    )


def _all(rows: Sequence[Result], field: str) -> str:
    return ", ".join(dict.fromkeys(str(row[field]) for row in rows))


def listing(study: Study, budget: str, rows: Sequence[Result]) -> str:
    """The variants with what they change, and which seeds have a row."""
    size, done = study.budget(budget), {Run(row.method, row["seed"]) for row in rows}
    count = sum(run in done for run in study.runs())
    lines = [f"budget {budget}: {size.steps} steps, {study.num_rows(size)} texts; {count} of {len(study.runs())} runs"]
    lines += ["variant, its seeds (x has a row, . has none; or gone), question and fields that differ:", ""]
    for name, variant in study.variants.items():
        seeds = "".join("x" if Run(name, seed) in done else "." for seed in range(variant.seeds)) or "gone"
        changes = ", ".join(f"{field}={value}" for field, value in variant.described().items()) or "the base"
        lines.append(f"{name:16} {seeds:4} {variant.question}  [{changes}]")
    return "\n".join(lines)

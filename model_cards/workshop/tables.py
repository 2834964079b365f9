"""Write what pages say of measurements from the committed rows.

Between `<!-- NAME:begin FILE [FILE ...] -->` and `<!-- NAME:end -->` stands what `RENDERED` makes of these files, which
are named as seen from the page's folder.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

from hf_domino._common.run_record import Run
from hf_domino.evaluation.benchmark.options import BASELINE, LOOKUP, PACKED, RECYCLED, keeps_seed
from hf_domino.evaluation.benchmark.report import (
    label,
    markdown_table,
    methods_of,
    modes_of,
    number,
    place_of,
    plain_label,
)
from hf_domino.evaluation.benchmark.summary import are_ties, count_equal, rows_of, speed_ratio, speed_ups_of, summarize
from hf_domino.evaluation.results import Result, measured, read_results
from hf_domino.publishing.released import read_released
from study.plan import load_study
from study.rows import of_budget
from study.summary import Summary
from study.summary import summarize as summarize_runs
from ways import ALONE, DTYPES, WITH_LOOKUP, Way, is_engine, prompts_of, ways_of, weights_of

EXAMPLES = "  python model_cards/workshop tables README.md docs/*.md model_cards/workshop/study/README.md\n"
OURS = (*RECYCLED, ALONE, WITH_LOOKUP)  # methods that run in hf_domino's loop with default settings
COMPILED = "plain, static"  # of model_cards/workshop/benchmarks/pairs.py
WEIGHTS = {
    "qwen2.5-coder-0.5b-instruct": "from the official Q4_K_M file",
    "smollm2-135m-instruct": "from a Q4_1 file",
}  # target -> what the weights of its rows were de-quantised from
REMOVED = ("medusa", "lookahead", "early_exit", "lean")  # no longer in the package: pages leave their results out
THREE_MINUTES = 186  # CPU-seconds, with what a last step takes too much
TASKS = {  # of Spec-Bench, in words
    "mt_bench": "MT-Bench",
    "qa": "question answering",
    "math_reasoning": "mathematics",
    "rag": "retrieval-augmented",
}
FEWEST_PROMPTS = 10  # of a mean with an interval
LONG = 64  # tokens; a first use of the prompt's length slows plain generation too much in shorter texts
MARKERS = re.compile(r"(<!-- (\w+):begin (\S+(?: \S+)*) -->\n).*?(<!-- \2:end -->)", re.DOTALL)


def speed(folder: Path, files: Sequence[str]) -> str:
    """How many times as fast the best method is on the prompts of each file, greedy, as sentences."""
    speeds = []
    for found in _by_setting(folder, files).values():
        said = []
        for name, rows in found.items():
            ratios = {method: speed_ratio(rows, method, BASELINE, "greedy")[0] for method in _ours(rows)}
            best = max(ratios, key=lambda method: ratios[method])
            said.append(f"**{ratios[best]:.1f} times as fast** on {prompts_of(name)} ({plain_label(best)})")
        first = measured(rows)[0]
        speeds.append(f"{first['target']} in {first['dtype']} on {place_of(first)} is {' and '.join(said)}")
    return (
        "`hf_domino` makes text generation in Hugging Face Transformers faster, "
        "and the output is still what your model would write alone.\n"
        f"On average, {'; '.join(speeds)}.\n"
    )


def gain(folder: Path, files: Sequence[str]) -> str:
    """The speed of every method over plain generation with its interval, and how many outputs are equal, by setting."""
    tables = []
    for setting, runs in _by_setting(folder, files).items():
        columns = _columns((prompts_of(name), rows) for name, rows in runs.items())
        found = {method for rows in runs.values() for method in methods_of(rows)}
        body = [
            [label(method), *(_ratio(rows, method, mode) for rows, mode in columns.values())]
            for method in (PACKED, LOOKUP, *OURS)
            if method in found
        ]
        if {PACKED, WITH_LOOKUP} <= found:
            cells = (_ratio(rows, WITH_LOOKUP, mode, PACKED) for rows, mode in columns.values())
            body.append([f"{label(WITH_LOOKUP)}, over plain, packed", *cells])
        exact = "; ".join(f"{prompts_of(name)}, {_equal(rows)}" for name, rows in runs.items())
        tables.append(
            f"{markdown_table(list(columns), body, setting)}\n"
            f"Outputs equal to those of plain `generate`, token by token: {exact}. "
            f"{_weights(*runs.values())}".rstrip()
        )
    return "\n\n".join(tables) + "\n"


def gpu(folder: Path, files: Sequence[str]) -> str:
    """Tokens a second of every method on a GPU, and in brackets over compiled plain generation."""
    runs = {name: _read(folder / name) for name in files}
    columns = _columns((rows[0]["target"], rows) for rows in runs.values())
    (setting,) = {f"{rows[0]['dtype']}, {place_of(rows[0])}" for rows in runs.values()}
    names = dict.fromkeys(row["method"] for rows, _ in columns.values() for row in rows)
    body = [[name, *(_speed_on_gpu(rows, name, mode) for rows, mode in columns.values())] for name in names]
    body.append(["prompts", *(str(len(rows_of(rows, BASELINE, mode))) for rows, mode in columns.values())])
    origins = "".join(f"- {_origin(rows, name)}\n" for name, rows in runs.items())
    return f"{markdown_table(list(columns), body, setting)}\n{origins}{_weights_line(*runs.values())}"


def methods(folder: Path, files: Sequence[str]) -> str:
    """Speed-up and tokens a forward of every method: a table for each target, a line for each file and mode."""
    runs = {name: rows for found in _by_setting(folder, files).values() for name, rows in found.items()}
    tables = []
    for target in dict.fromkeys(rows[-1]["target"] for rows in runs.values()):
        of_target = {name: rows for name, rows in runs.items() if rows[-1]["target"] == target}
        places = {name: place_of(measured(rows)[0]) for name, rows in of_target.items()}
        is_one_place = len(set(places.values())) == 1
        names = [
            method
            for method in dict.fromkeys(method for rows in of_target.values() for method in methods_of(rows))
            if method != BASELINE and not method.startswith(REMOVED)
        ]
        body = []
        for name, rows in of_target.items():
            setting = rows[-1]["dtype"] if is_one_place else f"{rows[-1]['dtype']}, {places[name]}"
            for mode, said in modes_of(rows).items():
                cells = [_speed_and_tokens(rows, method, mode) for method in names]
                body.append([f"{prompts_of(name)}, {said}, {setting}", *cells])
        corner = f"{target}, {places[name]}" if is_one_place else target
        origins = "".join(f"- {_origin(rows, name)}\n" for name, rows in of_target.items())
        table = markdown_table([label(method) for method in names], body, corner)
        tables.append(f"{table}\n{origins}{_weights_line(*of_target.values())}")
    return "\n".join(tables)


def released(folder: Path, files: Sequence[str]) -> str:
    """The released drafters in a FILE: one for each target that we ran or whose layout we tested."""
    known = read_released(folder / files[0])
    tested = list({one.target: one for one in reversed(known) if one.mark != "not tried"}.values())[::-1]
    return _text_table(["target", "drafter"], [[f"`{one.target}`", f"`{one.drafter}`"] for one in tested])


def contexts(folder: Path, files: Sequence[str]) -> str:
    """Acceptance and the time of a draft by the length of the prompt, without a window and with one."""
    rows = [row for name in files for row in read_results(folder / name)]
    window = max(row["window"] or 0 for row in rows)
    pairs = [name for figure in ("tokens a round", "ms a draft") for name in (figure, f"window {window}")]
    first = rows[0]
    head = [f"tokens of the prompt, {place_of(first)}", *pairs]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for length in sorted({row["context"] for row in rows}):
        cells = [f"{length:,}"]
        for field, digits in (("acceptance_length", 2), ("draft_ms", 1)):
            for has_window in (False, True):
                here = [row for row in rows if row["context"] == length and (row["window"] is not None) == has_window]
                cells.append(f"{sum(row[field] for row in here) / len(here):.{digits}f}")
        lines.append("| " + " | ".join(cells) + " |")
    equal = sum(row["equals_plain"] for row in rows)
    origin = (
        f"- [{Path(files[0]).name}]({files[0]}): {first['target']} in float32, greedy, full blocks, "
        f"{len(rows)} answers, of which {equal} equal plain generation's; {_machine(first)}.\n{_weights_line(rows)}"
    )
    return "\n".join(lines) + "\n\n" + origin


def rounds(folder: Path, files: Sequence[str]) -> str:
    """Milliseconds of a round of each method, a column for each batch size, and the floor of each."""
    rows = read_results(folder / files[0])
    sizes = sorted({row["batch_size"] for row in rows})
    found = {(row["method"], row["batch_size"]): row for row in rows}
    head = [name for size in sizes for name in (f"ms, {size} at once", "floor")]
    body = []
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for size in sizes:
            row = found.get((method, size))
            cells += ["", ""] if row is None else [f"{row['ms']:.1f}", f"{row['floor_ms']:.1f}"]
        body.append([method, *cells])
    first = rows[0]
    return (
        f"{markdown_table(head, body, place_of(first))}\n- [{Path(files[0]).name}]({files[0]}): {first['shapes']}, "
        f"{first['dtype']}, {first['context']} tokens of prompt, {_machine(first)}.\n"
    )


def kinds(folder: Path, files: Sequence[str]) -> str:
    """Acceptance length and training time of each published method, a column for each STUDY, FILE and budget in turn.

    Of runs at several learning rates (`eagle3`, `eagle3_rate_3`) the best one counts.
    """
    columns: dict[str, dict[str, Summary]] = {}
    for study_file, file, budget in zip(files[::3], files[1::3], files[2::3], strict=True):
        rows = of_budget(read_results(folder / file), budget)
        column = columns[f"{rows[0]['target']}, {rows[0]['steps']} steps"] = {}
        for one in sorted(summarize_runs(load_study(folder / study_file), rows), key=lambda one: one.acceptance_length):
            column[one.variant.partition("_rate_")[0]] = one
    as_published = {name for column in columns.values() for name in column if "_" not in name} - {*REMOVED}
    body = [
        [f"`{name}`", *(_length_and_time(column.get(name)) for column in columns.values())]
        for name in sorted(as_published)
    ]
    return markdown_table(list(columns), body)


def trained(folder: Path, files: Sequence[str]) -> str:
    """Acceptance length, steps and size of what was saved of each variant of a STUDY, at its best rate."""
    study, rows = load_study(folder / files[0]), of_budget(read_results(folder / files[1]))
    best: dict[str, Result] = {}
    for row in sorted(rows, key=lambda row: row["acceptance_length"]):
        best[row.method.partition("_rate_")[0]] = row
    body = []
    for name, row in sorted(best.items(), key=lambda pair: pair[1]["acceptance_length"]):
        steps = round(row["steps"] * row["changes"].get("effort", 1))
        is_trained = row["changes"]["learning_rate"] > 0
        size = f"{row['saved_bytes'] / 2**20:.1f} MB"
        length = f"{row['acceptance_length']:.2f} ± {row['acceptance_error']:.2f}"
        training = (f"{steps}", size) if is_trained else ("", "")
        body.append([f"{study.variants[name].question} (`{name}`)", length, *training])
    first = rows[0]
    head = ["tokens a round", "steps", "saved"]
    return (
        f"{markdown_table(head, body)}\n- [{Path(files[1]).name}]({files[1]}): {len(rows)} runs for {first['target']}, "
        f"{first['num_texts']} held-out texts, {_machine(first)}.\n"
    )


def minutes(folder: Path, files: Sequence[str]) -> str:
    """Tokens a forward of each method by rate, and in brackets the steps, which took about three minutes."""
    rows = [row for row in read_results(folder / files[0]) if row["cpu_seconds"] < THREE_MINUTES]
    rates = sorted({row["muon_learning_rate"] for row in rows})
    body = []
    for method in sorted({row["method"] for row in rows}):
        cells = []
        for rate in rates:
            found = [row for row in rows if (row["method"], row["muon_learning_rate"]) == (method, rate)]
            cells.append(", ".join(f"{row['tokens_per_forward']:.2f} ({row['steps']})" for row in found))
        body.append([f"`{method}`", *cells])
    first = rows[0]
    return (
        f"{markdown_table([f'rate {rate}' for rate in rates], body)}\n- [{Path(files[0]).name}]({files[0]}): "
        f"{first['target']}, {first['num_texts']} held-out texts, one thread, {_machine(*rows)}.\n"
    )


def costs(folder: Path, files: Sequence[str]) -> str:
    """What the trainings of Domino drafters took, a line for each file, and how many tokens a round then emitted."""
    body = []
    for name in files:
        if name.endswith(".json"):  # the record of one run
            run = Run.load((folder / name).parent)
            assert run is not None
            figures = {field: value for logged in run.log for field, value in logged.items()}
            cells = [f"{run.texts['train'].examples:,}", f"{run.steps:,}"]
            cells.append(f"{60 * figures['hours']:.0f} min on {run.provenance['hardware']}")
            cells.append(f"{figures['eval_walked_acceptance_length']:.2f}")
            body.append([f"[{_target_of(name)}]({name})", *cells])
            continue
        rows = read_results(folder / name)
        if "train_runtime" in rows[0]:  # runs that went on from each other
            target = _target_of(name)
            seconds = sum(row["train_runtime"] for row in rows)
            examples = int(rows[-1]["rows"].split()[0])
            steps = sum(row["steps"] for row in rows)
            length = rows[-1]["eval_walked_acceptance_length"]
        else:  # runs that ended in time, of which the best one counts
            best = max((row for row in rows if row["method"] == "domino"), key=lambda row: row["tokens_per_forward"])
            target, seconds, steps = best["target"], best["cpu_seconds"], best["steps"]
            examples = best["steps"] * best["rows"]
            length = best["tokens_per_forward"]
        hardware = rows[-1]["hardware"].split(",")[0].removesuffix(" without AMX")
        cells = [f"{examples:,}", f"{steps:,}", f"{seconds / 60:.0f} min on {hardware}", f"{length:.2f}"]
        body.append([f"[{target}]({name})", *cells])
    return markdown_table(["examples", "steps", "time", "tokens a round"], body)


def further(folder: Path, files: Sequence[str]) -> str:
    """What a drafter accepts on held-out text after each part of its training, a line for each."""
    rows = read_results(folder / files[0])
    body = [
        [
            row.method,
            f"{row['answers']:,}",
            f"{row['blocks']:,}",
            f"{row['cpu_minutes']:.0f}",
            *(f"{row[kind]:.0%}" for kind in ("code_drafted", "chat_drafted")),
            *(f"{row[kind]:.2f}" for kind in ("code", "chat")),
        ]
        for row in rows
    ]
    drafted = ("code in the draft vocabulary", "chat in it")
    head = ["answers", "blocks", "minutes", *drafted, "tokens a round, code", "tokens a round, chat"]
    return (
        f"{markdown_table(head, body, 'part')}\n- [{Path(files[0]).name}]({files[0]}): {rows[0]['target']}, "
        f"{rows[0]['num_texts']} held-out answers of each kind, {_machine(*rows)}.\n"
    )


def _target_of(name: str) -> str:
    """The target of a file in a drafter's folder."""
    return Path(name).parent.name.removesuffix("-domino")


def engines(folder: Path, files: Sequence[str]) -> str:
    """Greedy tokens a second of ours and of other engines: a table for each place, and who is ahead."""
    found = ways_of(folder, files)
    prompts = list(dict.fromkeys(map(prompts_of, files)))
    said = []
    for place in dict.fromkeys(way.place for way in found):
        here = [way for way in found if way.place == place]
        body = []
        for way in here:
            speeds = (way.speeds.get(name) for name in prompts)
            body.append([way.name, *("" if speed is None else f"{speed:.3g}" for speed in speeds)])
        said.append(f"{markdown_table(prompts, body, f'tokens a second, {place}')}\n{''.join(_compared(here))}\n")
    runs = {name: read_results(folder / name) for name in files}
    origins = "".join(f"- {_short_origin(rows, name)}\n" for name, rows in runs.items())
    weights = _weights_line(*(rows for rows in runs.values() if not is_engine(rows[-1])))
    return f"{''.join(said)}<details><summary>Rows</summary>\n\n{origins}{weights}\n</details>\n"


def _compared(ways: Sequence[Way]) -> list[str]:
    """How fast the fastest of ours is over the fastest of each other engine, by the prompts: a sentence an engine."""
    said = []
    for engine in dict.fromkeys(way.engine for way in ways if not way.is_ours):
        ratios = []
        for prompts in dict.fromkeys(name for way in ways for name in way.speeds):
            ours = [way.speeds[prompts] for way in ways if way.is_ours and prompts in way.speeds]
            others = [way.speeds[prompts] for way in ways if way.engine == engine and prompts in way.speeds]
            if ours and others:
                ratios.append(f"{max(ours) / max(others):.2f} times as fast on {prompts}")
        said.append(f"- The fastest of ours, over the fastest of **{engine}**: {', '.join(ratios)}.\n")
    return said


def _short_origin(rows: Sequence[Result], name: str) -> str:
    """Where rows of tokens a second lie, what they were measured on, and the memory of an engine's process."""
    found = [row for row in measured(rows) if row["mode"] == "greedy"]
    first = found[0]
    memory = ""
    if peaks := [row["peak_memory"] for row in found if row.get("peak_memory")]:
        memory = f", at most {max(peaks) / 2**30:.1f} GiB of memory"
    prompts = {str(row["sources"]) for row in found}
    weights = ", ".join(dict.fromkeys(map(weights_of, found)))
    return (
        f"[{Path(name).name}]({name}): {len(prompts)} prompts x {first['max_new_tokens']} tokens, {weights}, "
        f"{place_of(first)}{memory}; commit {first['commit'][:7]}, {first['date']}."
    )


def rollouts(folder: Path, files: Sequence[str]) -> str:
    """Tokens a forward of a policy's rollouts early and late in its training, and what following cost, by run."""
    rows = read_results(folder / files[0])
    first = rows[0]
    window = max(1, max(row["step"] for row in rows) // 4)
    runs = _grouped(rows, "method")
    quarters = (slice(window), slice(-window, None))
    body = []
    took = {}
    for name, found in runs.items():
        steps = [row | {"all_cpu_seconds": row["cpu_seconds"] + row["update_cpu_seconds"]} for row in found]
        cells = []
        for figure, digits in (("rollout/tokens_per_forward", 2), ("all_cpu_seconds", 1)):
            cells += [f"{mean(row[figure] for row in steps[quarter]):.{digits}f}" for quarter in quarters]
        took[name] = sum(row["all_cpu_seconds"] for row in steps)
        share = sum(row["update_cpu_seconds"] for row in steps) / took[name]
        body.append([f"`{name}`", *cells, f"{share:.0%}"])
    early, late = (mean(row["reward"] for row in runs[first.method][quarter]) for quarter in quarters)
    costs = [f"`{name}` took {took[name] / took[first.method]:.2f} times" for name in runs if name != first.method]
    tokens, seconds = "tokens a forward, first quarter", "CPU seconds a step, first quarter"
    head = [tokens, "last quarter", seconds, "last quarter", "updates, of all CPU seconds"]
    return (
        f"The mean reward was {early:.2f} in the first quarter of the steps and {late:.2f} in the last one. In CPU "
        f"seconds, {' and '.join(costs)} as long as `{first.method}`.\n\n"
        f"{markdown_table(head, body, place_of(first))}\n- [{Path(files[0]).name}]({files[0]}): "
        f"{len(runs[first.method])} steps for {first['target']}, seed {first['seed']}, float32, TRL {first['trl']}, "
        f"{_machine(first)}.\n"
    )


def edits(folder: Path, files: Sequence[str]) -> str:
    """Tokens a forward of prompt lookup in edit loops: a line for each memory, a column for each limit of tokens."""
    rows = read_results(folder / files[0])
    limits = sorted({row["limit"] for row in rows})
    body = []
    for method, of_method in _grouped(rows, "method").items():
        body.append([method, *(_tokens_a_round(row for row in of_method if row["limit"] == limit) for limit in limits)])
    changes = len({row["change"] for row in rows})
    first = rows[0]
    return (
        f"{markdown_table([f'up to {limit} tokens a round' for limit in limits], body)}\n"
        f"- [{Path(files[0]).name}]({files[0]}): {changes} change{'s' if changes > 1 else ''} to each of "
        f"{len({row['module'] for row in rows})} files, tokenizer of {first['tokenizer']}, seed {first['seed']}, "
        f"{_machine(*rows)}.\n"
    )


def _tokens_a_round(rows: Iterable[Result]) -> str:
    chosen = list(rows)
    return f"{_sum(chosen, 'new_tokens') / _sum(chosen, 'rounds'):.2f}"


def tasks(folder: Path, files: Sequence[str]) -> str:
    """The speed over plain generation by task, a column for each method, and the lowest and the mean of all prompts."""
    rows = read_results(folder / files[0])
    names = [name for name in dict.fromkeys(row.method for row in rows) if name != BASELINE]
    body = []
    for name, part in (_grouped(rows, "task") | {"**all prompts**": rows}).items():
        count = len({row["prompt"] for row in part})
        cell = _ratio if count >= FEWEST_PROMPTS else _mean_ratio
        body.append([f"{TASKS.get(name, name)} ({count})", *(cell(part, method, "greedy") for method in names)])
    slowest = (min(speed_ups_of(rows, method, BASELINE, "greedy")) for method in names)
    body.append(["slowest prompt", *(number(ratio, " x") for ratio in slowest)])
    warm = [row for row in rows if row["half"] == "warm" and row["task"] != "conversation"]
    memory, others = names[-1], names[-2]
    ratio, low, high = speed_ratio(warm, memory, others, "greedy")
    ours = [row for row in rows if row.method in (*RECYCLED, memory)]
    first = rows[0]
    return (
        f"{markdown_table([plain_label(name) for name in names], body, _setting(rows))}\n"
        f"In the second half of each task's questions, when the memory held the first half, {memory} was {ratio:.2f} "
        f"times ({low:.2f} to {high:.2f}) as fast as {plain_label(others)}.\n\n"
        f"- [{Path(files[0]).name}]({files[0]}): greedy, {first['max_new_tokens']} tokens, {_machine(*rows)}; "
        f"{count_equal(ours)} of {len(ours)} outputs equal plain `generate`'s.\n{_weights_line(rows)}"
    )


def pass_rates(folder: Path, files: Sequence[str]) -> str:
    """How many problems of HumanEval each way of generation solves, whether the texts are equal, and what they took."""
    ways = _grouped(read_results(folder / files[0]), "method")
    body = []
    for method, rows in ways.items():
        solved, equal = (f"{_sum(rows, figure)} of {len(rows)}" for figure in ("passes", "equals_plain"))
        cells = (solved, equal, f"{_sum(rows, 'new_tokens'):,}", f"{_sum(rows, 'seconds'):.0f}")
        body.append([plain_label(method), *cells])
    first = ways[BASELINE][0]
    return (
        f"{markdown_table(['pass@1', 'texts equal to plain', 'tokens', 'seconds'], body, _setting(ways[BASELINE]))}\n"
        f"- [{Path(files[0]).name}]({files[0]}): {len(ways[BASELINE])} problems of HumanEval, greedy, whole answers of "
        f"up to {first['max_new_tokens']} tokens, {_machine(*ways[BASELINE])}.\n{_weights_line(ways[BASELINE])}"
    )


def whole_answers(folder: Path, files: Sequence[str]) -> str:
    """What whole answers took with a drafter and without, and how many passed, in a sentence."""
    ways = _grouped(read_results(folder / files[0]), "method")
    plain, drafted = ways[BASELINE], ways[WITH_LOOKUP]
    (before, passed), (after, still) = ((_sum(rows, "seconds"), _sum(rows, "passes")) for rows in (plain, drafted))
    passes = f"{still} answers pass the tests, and {passed} of plain generation's."
    if passed == still and all(row["equals_plain"] for row in drafted):
        passes = f"The texts are the same, and {passed} answers pass the tests either way."
    return (
        f"Whole answers to {len(plain)} problems of HumanEval took {after:.0f} seconds with the drafter and prompt "
        f"lookup instead of {before:.0f} with plain `generate`. {passes}\n"
    )


def choices(folder: Path, files: Sequence[str]) -> str:
    """How often packed weights changed the token that a model chose: a sentence for each run, once."""
    runs: dict[tuple[str, str, int], dict[int, Result]] = {}
    for row in read_results(folder / files[0]):
        runs.setdefault((row["target"], row["dtype"], row["seed"]), {})[row["width"]] = row
    said = []
    for (target, dtype, _), of_width in runs.items():
        widths, rows = zip(*sorted(of_width.items()), strict=True)
        greedy, sampled = ([row[figure] for row in rows] for figure in ("greedy", "sampled"))
        changed = "packed weights changed none of them, greedy or sampled"
        if any(greedy + sampled):
            changed = f"{_listed(greedy)} greedy and {_listed(sampled)} sampled ones differ"
        said.append(
            f"{target} in {dtype} chose {rows[0]['num_tokens']:,} tokens one at a time with its own weights, and again "
            f"with packed ones, {_listed(widths)} at a time: {changed} "
            f"([{Path(files[0]).name}]({files[0]}), {_machine(*rows)}).\n"
        )
    return "".join(said)


def recipe(folder: Path, files: Sequence[str]) -> str:
    """CPU-minutes of each stage of a recipe, by the first of FILES, and what its drafter emitted, by the other."""
    spent: dict[str, float] = {}
    for row in read_results(folder / files[0]):
        spent[row.method] = spent.get(row.method, 0.0) + row["cpu_minutes"]
    took = ", ".join(f"{name} {time:.1f}" for name, time in spent.items())
    rows = measured(read_results(folder / files[1]))
    others = [row for row in rows if row["method"] != BASELINE]
    emitted = ", ".join(
        f"{label(method).strip('*')} {number(summarize(rows, method, 'greedy').tokens_per_forward)}"
        for method in dict.fromkeys(row["method"] for row in others)
    )
    return (
        f"- CPU-minutes: {took}; together {sum(spent.values()):.1f}.\n"
        f"- Tokens per forward: {emitted}.\n"
        f"- [{Path(files[1]).name}]({files[1]}): {len({row['prompt'] for row in rows})} prompts, "
        f"{count_equal(others)} of {len(others)} outputs equal plain "
        f"`generate`'s; {_machine(rows[0])}.\n"
    )


TABLES = (
    speed,
    gain,
    gpu,
    methods,
    released,
    contexts,
    rounds,
    kinds,
    trained,
    minutes,
    costs,
    further,
    engines,
    rollouts,
    edits,
    tasks,
    pass_rates,
    whole_answers,
    choices,
    recipe,
)
RENDERED = {function.__name__: function for function in TABLES}


def _columns(named: Iterable[tuple[str, list[Result]]]) -> dict[str, tuple[list[Result], str]]:
    """A column for each mode of the rows, by what they are about."""
    columns: dict[str, tuple[list[Result], str]] = {}
    for about, rows in named:
        new = {f"{about}, {said}": (rows, mode) for mode, said in modes_of(rows).items()}
        if both := columns.keys() & new.keys():
            raise ValueError(f"two files have results for {both.pop()}: name their prompts in MEASURED_ON")
        columns |= new
    return columns


def _grouped(rows: Iterable[Result], name: str) -> dict[Any, list[Result]]:
    """The rows by a setting or by their method, in the order in which each first occurs."""
    groups: dict[Any, list[Result]] = {}
    for row in rows:
        groups.setdefault(row[name], []).append(row)
    return groups


def _listed(values: Iterable[Any]) -> str:
    """Values in words: 1, 2 and 3."""
    *others, last = map(str, values)
    return f"{', '.join(others)} and {last}" if others else last


def _sum(rows: Iterable[Result], figure: str) -> Any:
    return sum(row[figure] for row in rows)


def _text_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A table of words, which are aligned to the left."""
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _machine(*rows: Result) -> str:
    """What rows were measured on: hardware and date of the first, and every commit."""
    commits = sorted({row["commit"][:7] for row in rows})
    noun = "commit" if len(commits) == 1 else "commits"
    return f"{rows[0]['hardware']}, {noun} {', '.join(commits)}, {rows[0]['date']}"


def _setting(rows: Sequence[Result]) -> str:
    """What rows can only be compared within: target, dtype, and what computed them."""
    first = measured(rows)[0]
    return f"{first['target']} in {first['dtype']}, {place_of(first)}"


def _by_setting(folder: Path, files: Sequence[str]) -> dict[str, dict[str, list[Result]]]:
    """The rows of files by their setting: targets in their order, and of each the dtype first that its files have."""
    runs = {name: read_results(folder / name) for name in files}
    targets = list(dict.fromkeys(measured(rows)[0]["target"] for rows in runs.values()))
    groups: dict[str, dict[str, list[Result]]] = {}
    for name, rows in sorted(
        runs.items(),
        key=lambda run: (targets.index(run[1][-1]["target"]), DTYPES.index(run[1][-1]["dtype"])),
    ):
        groups.setdefault(_setting(rows), {})[name] = rows
    return groups


def _weights(*runs: Sequence[Result]) -> str:
    """A sentence for each target whose weights are not the published ones."""
    targets = dict.fromkeys(rows[-1]["target"] for rows in runs)
    said = (f"The weights of {target} were de-quantised {WEIGHTS[target]}." for target in targets if target in WEIGHTS)
    return " ".join(said)


def _weights_line(*runs: Sequence[Result]) -> str:
    said = _weights(*runs)
    return f"- {said}\n" if said else ""


def _ours(rows: Sequence[Result]) -> list[str]:
    """The methods of a file that run in hf_domino's loop with default settings."""
    return [method for method in OURS if method in methods_of(rows)]


def _ratio(rows: Sequence[Result], method: str, mode: str, over: str = BASELINE) -> str:
    """The geometric mean of the speed over another method's, with its 95 % interval."""
    if not rows_of(rows, method, mode):
        return ""
    mean, low, high = speed_ratio(rows, method, over, mode)
    return f"{mean:.2f} x ({low:.2f}–{high:.2f})"  # noqa: RUF001


def _mean_ratio(rows: Sequence[Result], method: str, mode: str) -> str:
    """The geometric mean of the speed over plain generation alone."""
    return f"{geometric_mean(speed_ups_of(rows, method, BASELINE, mode)):.2f} x"


def _equal(rows: Sequence[Result]) -> str:
    ours = [row for mode in modes_of(rows) for method in _ours(rows) for row in rows_of(rows, method, mode)]
    equal = count_equal(ours)
    text = f"{equal} of {len(ours)}"
    examined = [row for row in ours if row.get("divergences")]  # repeated, plain generation wrote the others, too
    if examined:
        ties = sum(map(are_ties, examined))
        text += f" ({len(ours) - equal} differ; of {len(examined)} examined, {ties} do so at a near tie)"
    return text


def _speed_and_tokens(rows: Sequence[Result], method: str, mode: str) -> str:
    if not rows_of(rows, method, mode):
        return ""
    emitted = summarize(rows, method, mode).tokens_per_forward
    tokens = f" ({number(emitted)})" if emitted else ""
    return number(speed_ratio(rows, method, BASELINE, mode)[0], " x") + tokens


def _read(path: Path) -> list[Result]:
    """Measured rows; of those of `model_cards/workshop/benchmarks/pairs.py` the prompts whose texts are all long."""
    rows = read_results(path)
    if "seconds_each" in rows[-1]:
        return rows
    short = {(row["mode"], row["prompt"]) for row in rows if row["new_tokens"] < LONG}
    return [row for row in rows if (row["mode"], row["prompt"]) not in short]


def _speed_on_gpu(rows: Sequence[Result], method: str, mode: str) -> str:
    speeds = [row["tokens_per_second"] for row in rows_of(rows, method, mode)]
    return f"{geometric_mean(speeds):.0f} ({speed_ratio(rows, method, COMPILED, mode)[0]:.2f})" if speeds else ""


def _length_and_time(one: Summary | None) -> str:
    return f"{one.acceptance_length:.2f} ({one.figures['cpu_seconds']:.0f} s)" if one else ""


def _origin(rows: Sequence[Result], name: str) -> str:
    """Where rows lie, what they were measured on, and how many outputs equal plain generation's."""
    first, others = measured(rows)[0], [row for row in measured(rows) if row["method"] != BASELINE]
    texts = []
    for mode, said in modes_of(rows).items():
        promised = [row for row in others if row["mode"] == mode and (mode == "greedy" or keeps_seed(row["method"]))]
        texts.append(f"{count_equal(promised)} of {len(promised)} {said}")
    diverged = [row for row in others if row.get("divergences")]
    ties = ""
    if diverged:
        ties = f" (of {len(diverged)} differences examined, {sum(map(are_ties, diverged))} are at a tie)"
    prompts = {row["prompt"] for row in measured(rows)}
    return (
        f"[{Path(name).name}]({name}): {len(prompts)} prompts x {first['max_new_tokens']} tokens, {first['dtype']}, "
        f"{place_of(first)}; outputs equal to plain `generate`'s: {' and '.join(texts)}{ties}; "
        f"commit {first['commit'][:7]}, {first['date']}."
    )


def filled(page: Path) -> str:
    """The text of a page with every marked place made anew."""

    def replace(found: re.Match[str]) -> str:
        return found[1] + RENDERED[found[2]](page.parent, found[3].split()) + found[4]

    return MARKERS.sub(replace, page.read_text(encoding="utf-8"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the pages."""
    parser.add_argument("pages", type=Path, nargs="+", help="Markdown files with marked places")


def run(options: argparse.Namespace) -> None:
    """Write the pages."""
    for page in options.pages:
        page.write_text(filled(page), encoding="utf-8")

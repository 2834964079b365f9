"""`python model_cards/workshop study`: Domino against its twin and its variants, by equal data and steps."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from hf_domino.cli.flags import positive_int

if TYPE_CHECKING:
    from study.plan import Study
    from study.texts import Source

EXAMPLES = """\
  python model_cards/workshop study --list
  python model_cards/workshop study --work study-work --rows study.jsonl --processes 2
  python model_cards/workshop study --rows study.jsonl --figures docs/study
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python model_cards/workshop study`."""
    add = parser.add_argument_group("what is compared").add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="these variants (default: all)")
    add("--seeds", nargs="+", type=int, default=[], metavar="N", help="these seeds (default: those of each variant)")
    add("--budget", help="steps and texts of a run (default: default; of --figures and --json: the one with most rows)")
    add("--study", type=Path, help="YAML with a base, budgets and variants of your own (default: the package's)")
    _add_texts(parser.add_argument_group("target and texts"))
    add = parser.add_argument_group("how it runs").add_argument
    add("--work", type=Path, default=Path("study-work"), help="folder for texts, weights and logs")
    add("--rows", type=Path, default=Path("study.jsonl"), help="where rows are added to, or read from")
    add("--processes", type=positive_int, default=2, help="runs at a time, each in a process of its own")
    add("--threads", type=positive_int, default=1, help="CPU threads of each")
    add("--no-cache", action="store_true", help="run the target in every run; its hidden states take disk space")
    add = parser.add_argument_group("instead of training").add_argument
    add("--list", action="store_true", help="show the variants, and which runs have a row")
    add("--json", action="store_true", help="print what --rows say, for machines")
    add("--figures", type=Path, help="draw what --rows say into this folder")


def _add_texts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", help="folder or Hub name of the target (default: the bundled one)")
    group.add_argument(
        "--train-file", type=Path, help="rows as for hf-domino train, whose prompts the target continues"
    )
    group.add_argument("--eval-file", type=Path, help="held-out ones (default of both: the recipe's corpus)")
    group.add_argument(
        "--as-written", action="store_true", help="train on the files' rows: the target wrote their answers already"
    )
    group.add_argument("--packages", type=Path, help="folder with that corpus's packages (default: install them)")
    group.add_argument("--prompt-length", type=positive_int, default=64, help="tokens of plain text to use as a prompt")
    group.add_argument("--max-new-tokens", type=positive_int, default=144, help="longest text of the target, in tokens")


def run(options: argparse.Namespace) -> int:
    """Run `python model_cards/workshop study`; returns 1 where a run failed."""
    from study.plan import STUDY_FILE, load_study

    study = load_study(options.study or STUDY_FILE)
    if options.list or options.json or options.figures:
        return _show(options, study)
    from study.conduct import Settings, conduct, report_failures

    runs, budget = study.runs(options.only, options.seeds), options.budget or "default"
    study.budget(budget)
    source = _source(options, study)
    settings = Settings(
        source, options.work, options.rows, budget, options.processes, options.threads, not options.no_cache
    )
    return report_failures(conduct(study, runs, settings))


def _source(options: argparse.Namespace, study: Study) -> Source:
    """Target and prompts that the flags name, checked before anything is written."""
    from hf_domino.pair import find_target
    from recipes.study_prompts import rows_of_corpus
    from study.texts import HELD_OUT, PLAIN, Source, rows_as_written, rows_of_files

    files = {"--train-file": options.train_file, "--eval-file": options.eval_file}
    missing = [name for name, file in files.items() if file is None]
    if len(missing) == 1 or (missing and options.target):
        raise ValueError(f"{missing[0]} must be set with a target or a file of your own, got none.")
    for name, file in files.items():
        if file is not None and not file.is_file():
            raise ValueError(f"{name} must be a .jsonl, .json or text file, got {str(file)!r}: there is none there.")
    if missing and options.as_written:
        raise ValueError("--train-file must be set with --as-written, got none: the rows to train on.")
    target = find_target(options.target)
    new = options.max_new_tokens
    if missing:
        return Source(target, rows_of_corpus(options.work, options.packages, target, new), new)
    named = {PLAIN: options.train_file, HELD_OUT: options.eval_file}
    if options.as_written:
        return rows_as_written(named, target, study.base["max_length"])
    return Source(target, rows_of_files(named, target, options.prompt_length, study.base["max_length"]), new)


def _show(options: argparse.Namespace, study: Study) -> int:
    """List the variants, or print or publish what the rows say."""
    from hf_domino._common.figures import write_figures
    from study.figures import make_figures
    from study.page import listing
    from study.rows import of_budget, read_rows
    from study.summary import summarize

    if options.list:
        budget = options.budget or "default"
        done = read_rows(options.rows) if options.rows.exists() else []
        print(listing(study, budget, [row for row in done if row["budget"] == budget]))
        return 0
    rows = of_budget(read_rows(options.rows), options.budget)
    if options.figures:
        print(*write_figures(make_figures(study, rows), options.figures), sep="\n")
    if options.json:
        print(json.dumps([summary.to_dict() for summary in summarize(study, rows)], indent=1))
    return 0

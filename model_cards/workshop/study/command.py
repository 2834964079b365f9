"""`python model_cards/workshop study`: compare Domino, the DFlash baseline and variants on equal data and steps."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hf_domino.cli.flags import positive_int

EXAMPLES = """\
  python model_cards/workshop study --list
  python model_cards/workshop study --work study-work --results study.jsonl --processes 2
  python model_cards/workshop study --results study.jsonl --figures model_cards/workshop/study
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python model_cards/workshop study`."""
    add = parser.add_argument
    add("--only", nargs="+", default=[], metavar="NAME", help="these variants (default: all)")
    add("--seeds", nargs="+", type=int, default=[], metavar="N", help="these seeds (default: those of each variant)")
    add("--budget", help="steps and texts of a run (default: default; of --figures: the one with most rows)")
    add("--study", type=Path, help="YAML with a base, budgets and variants of your own (default: study.yaml)")
    add("--target", help="folder or Hub name of the target (default: the bundled one)")
    add("--train-file", type=Path, help="rows that the target wrote (default: it continues the recipe's corpus)")
    add("--eval-file", type=Path, help="held-out ones")
    add("--packages", type=Path, help="folder with the corpus's packages (default: install them)")
    add("--max-new-tokens", type=positive_int, default=144, help="longest text of the target, in tokens")
    add("--work", type=Path, default=Path("study-work"), help="folder for texts, weights and logs")
    add("--results", type=Path, default=Path("study.jsonl"), help="where rows are added to, or read from")
    add("--processes", type=positive_int, default=2, help="runs at a time, each in a process of its own")
    add("--threads", type=positive_int, default=1, help="CPU threads of each")
    add("--list", action="store_true", help="show the variants, and which runs have a row")
    add("--figures", type=Path, help="draw what --results say into this folder")


def run(options: argparse.Namespace) -> int:
    """Run `python model_cards/workshop study`; returns 1 where a run failed."""
    from hf_domino.evaluation.results import read_results
    from study.page import listing
    from study.plan import STUDY_FILE, load_study
    from study.rows import of_budget

    study, budget = load_study(options.study or STUDY_FILE), options.budget or "default"
    if options.figures:
        from figures import write_figures
        from study.figures import make_figures

        rows = of_budget(read_results(options.results), options.budget)
        print(*write_figures(make_figures(study, rows), options.figures), sep="\n")
        return 0
    if options.list:
        done = read_results(options.results) if options.results.exists() else []
        print(listing(study, budget, [row for row in done if row["budget"] == budget]))
        return 0
    from hf_domino._common.errors import invalid_argument
    from hf_domino.pair import find_target
    from study.run import conduct
    from study.texts import MIXED, text_of_corpus, text_of_files

    runs, size, target = study.runs(options.only, options.seeds), study.budget(budget), find_target(options.target)
    counts, files = (study.num_rows(size), size.texts), (options.train_file, options.eval_file)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if not any(files) and options.target is None:
        texts = text_of_corpus(options.work, options.packages, target, *counts, options.max_new_tokens)
    else:
        for flag, file in zip(("--train-file", "--eval-file"), files, strict=True):
            if file is None or not file.is_file():
                raise invalid_argument(
                    flag, "a file of rows that the target wrote", file and str(file), "See hf-domino data."
                )
        for name in (run.variant for run in runs if study.variants[run.variant].text != MIXED):
            raise invalid_argument(
                f"text of {name} with --train-file", MIXED, study.variants[name].text, "Name others: --only."
            )
        texts = text_of_files(options.work, files, target, counts, study.base["max_length"])
    return conduct(study, runs, target, texts, budget, options.work, options.results, options.processes)

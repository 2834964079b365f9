"""A study from names and files to a file of rows: what has a row is skipped, what was killed starts again."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_domino._common.refusal import refusal
from study.plan import TEXTS, Run, Study, Variant
from study.rows import Row, append, finished, read_rows
from study.run import JOB_FILE, ROW_FILE, WEIGHTS, Job
from study.schedule import Command, python, run_all
from study.texts import EVALUATION, Source, cut_prompts, digest_of, mix, settings_file, take_rows, writing

ONE_TEXT = "A file's rows are one text: name the other variants with --only."
# What the target's hidden states depend on, and which of them are kept.
OF_STATES = {"text", "target_layer_ids", "distillation_weight", "target_dtype", "max_length", "bf16", "fp16"}


@dataclass(frozen=True)
class Settings:
    """Where and how a study runs; `shares_states`: runs that read the same share the target's hidden states."""

    source: Source
    work: Path
    rows: Path
    budget: str
    processes: int
    threads: int
    shares_states: bool = True

    def folder_of(self, run: Run) -> Path:
        """Where a run's weights and log are."""
        return self.work / self.budget / run.name


def conduct(study: Study, runs: list[Run], settings: Settings) -> dict[str, str]:
    """Train what has no row yet and add the rows.

    Returns:
        `dict[str, str]`: Name to the end of its log, of each run that failed.

    Raises:
        ValueError: If the rows that are there were made with other data or fields, or a file holds too few rows.
    """
    for run in runs:
        if settings.source.as_written and (text := study.variants[run.variant].text) != TEXTS[0]:
            raise refusal(f"text of {run.variant} with --as-written", TEXTS[0], text, ONE_TEXT)
    texts = prepare_texts(study, settings)
    starts = {run: _start_of(study, run, settings, texts) for run in runs}
    done = finished(read_rows(settings.rows) if settings.rows.exists() else [], starts)
    todo = [run for run in runs if run not in done]
    parents = {_parent_of(study, run) for run in todo}
    absent = {run for run in parents if run and not (settings.folder_of(run) / WEIGHTS).exists()}
    everything = [run for run in study.runs(seeds=sorted({run.seed for run in todo})) if run in {*todo, *absent}]
    commands = [_command(study, run, settings, texts, starts.get(run, {}), absent) for run in everything]
    print(f"{len(done)} of {len(runs)} runs have a row in {settings.rows}; {len(commands)} to train", flush=True)
    progress = _Progress(settings, len(commands), {run.name for run in todo})
    return run_all(commands, settings.processes, settings.threads, progress.finished)


def prepare_texts(study: Study, settings: Settings) -> Path:
    """Let the target write what is trained and evaluated on, unless it is there; returns the folder of texts.

    Raises:
        ValueError: If the target could not write.
    """
    budget = study.budget(settings.budget)
    num_rows = study.num_rows(budget)
    folder = settings.work / f"texts-{num_rows}-{budget.texts}"
    if settings.source.as_written:
        folder = folder.with_name(f"{folder.name}-{settings.source.as_written}")
        take_rows(settings.source, folder, num_rows, budget.texts)
        return folder
    cut_prompts(settings.source, folder, num_rows, budget.texts)
    if commands := writing(settings.source, folder):
        print(f"the target writes {num_rows} texts twice and {budget.texts} to evaluate on", flush=True)
        for name, end in run_all(commands, settings.processes, settings.threads).items():
            raise ValueError(f"{name} could not be written:\n{end}")
    if not (folder / "mixed.jsonl").exists():
        mix(folder)
    return folder


def _parent_of(study: Study, run: Run) -> Run | None:
    """The run whose backbone a run takes over."""
    name = study.variants[run.variant].backbone_of
    return None if name is None else Run(name, run.seed)


def _start_of(study: Study, run: Run, settings: Settings, texts: Path) -> Row:
    """What a run's row begins with: all that tells it from others, and all that must be equal in others."""
    recorded = json.loads(settings_file(texts / f"{EVALUATION}.jsonl").read_text(encoding="utf-8"))["target"]
    return {
        "variant": run.variant,
        "seed": run.seed,
        "budget": settings.budget,
        "changes": study.variants[run.variant].described(),
        "steps": study.budget(settings.budget).steps,
        "base": study.base,
        "target": recorded["name"],
        "target_weights": recorded["weights_digest"],
        "texts_digest": digest_of(texts),
    }


def _command(
    study: Study, run: Run, settings: Settings, texts: Path, start: Mapping[str, Any], absent: set[Run]
) -> Command:
    variant, folder, parent = study.variants[run.variant], settings.folder_of(run), _parent_of(study, run)
    fields = study.base | variant.changes | {
        "target": settings.source.target,
        "train_file": str(texts / f"{variant.text}.jsonl"),
        "eval_file": str(texts / f"{EVALUATION}.jsonl"),
        "output_dir": str(folder),
        "max_steps": round(study.budget(settings.budget).steps * variant.effort),
        "seed": run.seed,
    }  # fmt: skip
    if settings.shares_states:
        fields["cache_hidden_states"] = str(texts / _states_of(study, variant))
    Job(fields, str(settings.folder_of(parent)) if parent else None, dict(start)).write()
    after = (parent.name,) if parent and parent in absent else ()
    words = python("study.run", str(folder / JOB_FILE))
    return Command(run.name, words, folder / "log.txt", after)


def _states_of(study: Study, variant: Variant) -> str:
    """Name of the folder of hidden states of all runs that read the same ones: others do not wait for them."""
    described = sorted(variant.described().items())
    own = {name: value for name, value in described if name in OF_STATES and value != study.base.get(name)}
    return f"hidden_states-{hashlib.sha256(json.dumps(own).encode()).hexdigest()[:8]}" if own else "hidden_states"


class _Progress:
    """Adds the row of each run that succeeded, and says how far the study is."""

    def __init__(self, settings: Settings, count: int, wanted: set[str]):
        self.settings, self.count, self.wanted = settings, count, wanted
        self.done, self.began = 0, time.monotonic()

    def finished(self, name: str) -> None:
        """Read the row of a run, add it, and print a line."""
        row = json.loads((self.settings.work / self.settings.budget / name / ROW_FILE).read_text(encoding="utf-8"))
        if name in self.wanted:
            append(self.settings.rows, row)
        self.done += 1
        left = (time.monotonic() - self.began) / self.done * (self.count - self.done) / 60
        print(
            f"[{self.done}/{self.count}] {name}: acceptance length {row['acceptance_length']:.3f} over "
            f"{row['num_rounds']} rounds, {row['seconds']:.0f} s of training; about {left:.0f} min left",
            flush=True,
        )


def report_failures(failed: Mapping[str, str]) -> int:
    """Say which runs failed; 1 if any did, else 0."""
    for name, end in failed.items():
        print(f"{name} failed:\n{end}\n", file=sys.stderr)
    return int(bool(failed))

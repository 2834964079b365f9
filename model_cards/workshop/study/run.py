"""Runs of a study, each in a process of its own: train, simulate rounds over held-out text, and leave a row."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import fields, replace
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino._common.provenance import provenance
from hf_domino._common.run_record import Run as TrainingRun
from hf_domino.cli.main import main as hf_domino
from hf_domino.configuration.registry import config_classes
from hf_domino.data.rows import load_rows
from hf_domino.evaluation.check.estimate import estimate_mean
from hf_domino.evaluation.results import Result, append_results, read_results
from hf_domino.methods import DominoDraftModel
from hf_domino.stats.decoding_stats import DecodingStats
from hf_domino.targets.identity import identify
from hf_domino.training.evidence.acceptance import simulate_acceptance
from hf_domino.training.fields import DrafterArguments
from hf_domino.training.parts import fields_of_head
from recipes.processes import PATH
from study.plan import Run, Study
from study.rows import finished
from study.texts import EVALUATION, digest_of

JOB_FILE, RESULT_FILE, WEIGHTS = "job.yaml", "result.jsonl", "model.safetensors"
OF_A_HEAD = set[str]().union(*(fields_of_head(method) for method in config_classes()))
OF_A_BACKBONE = {field.name for field in fields(DrafterArguments)} - OF_A_HEAD
# What a study's file leaves out: as when the first rows were made, so that rows can be compared.
LEFT_OUT = {"learning_rate": 6e-4, "muon_learning_rate": None, "distillation_weight": 0.0, "pure_draft_prefix_len": 0}
# No checkpoints: a run that is killed starts again. Rounds are simulated here, with what the row needs of them.
ALWAYS = {
    "report_to": "none",
    "save_strategy": "no",
    "walk_rows": 0,
    "disable_tqdm": True,
    "logging_steps": 20,
    "overwrite": True,
}


def conduct(
    study: Study, runs: Sequence[Run], target: str, texts: Path, budget: str, work: Path, rows: Path, at_once: int
) -> int:
    """Train what has no row yet, `at_once` runs at a time, and add the rows; 1 if a run failed, else 0."""
    same = {
        "budget": budget,
        "steps": study.budget(budget).steps,
        "base": study.base,
        **_target_of(target),
        "texts_digest": digest_of(texts),
    }
    settings = {run: {"seed": run.seed, "changes": study.variants[run.variant].described()} | same for run in runs}
    done = finished(read_results(rows) if rows.exists() else [], settings)
    todo = [run for run in runs if run not in done]
    parents = {Run(parent, run.seed) for run in todo if (parent := study.variants[run.variant].backbone_of)}
    needed = {run for run in parents if not (work / budget / run.name / WEIGHTS).exists()} | set(todo)
    ordered = [run for run in study.runs(seeds=sorted({run.seed for run in todo})) if run in needed]
    print(f"{len(done)} of {len(runs)} runs have a row in {rows}; {len(ordered)} to train", flush=True)
    futures: dict[Run, Future[Result | None]] = {}
    with ThreadPoolExecutor(at_once) as pool:
        for run in ordered:  # a backbone comes before the runs that take it over
            futures[run] = pool.submit(_run_alone, study, run, target, texts, budget, work, futures)
        run_of = {future: run for run, future in futures.items()}
        for future in as_completed(run_of):
            run, row = run_of[future], future.result()
            if row is not None and run in settings:
                print(f"{run.name}: acceptance length {row['acceptance_length']:.3f}", flush=True)
                append_results(rows, [replace(row, method=run.variant, settings=settings[run] | dict(row.settings))])
    return int(any(future.result() is None for future in futures.values()))


def _target_of(target: str) -> dict[str, str]:
    identity = identify(AutoModelForCausalLM.from_pretrained(target, dtype="auto")).to_dict()
    return {"target": identity["name"], "target_weights": identity["weights_digest"]}


def _run_alone(
    study: Study, run: Run, target: str, texts: Path, budget: str, work: Path, others: Mapping[Run, Future]
) -> Result | None:
    """Train a run in a process of its own; its result, or None where it failed, which is said."""
    variant, folder = study.variants[run.variant], work / budget / run.name
    given = study.base | variant.changes
    left_out = {name: value for name, value in LEFT_OUT.items() if "drafter" not in given or name not in OF_A_HEAD}
    given = left_out | given | ALWAYS
    if variant.backbone_of is not None:
        parent = Run(variant.backbone_of, run.seed)
        if parent in others and others[parent].result() is None:
            print(f"{run.name} failed: {parent.name} must succeed first.", file=sys.stderr)
            return None
        given = {name: value for name, value in given.items() if name not in OF_A_BACKBONE}
        given |= {"drafter": str(work / budget / parent.name), "train_only": "head"}
    given |= {
        "target": target,
        "train_file": str(texts / f"{variant.text}.jsonl"),
        "eval_file": str(texts / f"{EVALUATION}.jsonl"),
        "output_dir": str(folder),
        "max_steps": round(study.budget(budget).steps * variant.effort),
        "seed": run.seed,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JOB_FILE).write_text(yaml.safe_dump(given), encoding="utf-8")
    log = folder.with_suffix(".log")
    code = in_a_process(["study.run", str(folder / JOB_FILE)], log)
    if code:
        end = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-6:])
        print(f"{run.name} failed:\n{end}\n", file=sys.stderr)
        return None
    return read_results(folder / RESULT_FILE)[0]


def in_a_process(arguments: Sequence[str], log: Path) -> int:
    """The exit code of what `python -m` would do."""
    with log.open("wb") as said:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command, stdout=said, stderr=subprocess.STDOUT, env=os.environ | PATH, check=False
        ).returncode


def run_job(path: Path) -> Result:
    """Train what a job says, and measure it on its held-out text."""
    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    clock, cpu_clock = time.perf_counter(), time.process_time()
    if code := hf_domino(["train", str(path), "--traceback"]):
        sys.exit(code)
    spent = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu_clock}
    folder = path.parent
    trained = TrainingRun.load(folder)
    assert trained is not None
    losses = trained.evaluations[-1]
    drafter = DominoDraftModel.from_pretrained(folder, dtype=torch.float32)
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=job["target_dtype"]).eval()
    texts = load_rows(job["eval_file"], AutoTokenizer.from_pretrained(job["target"]), job["max_length"])
    written = [texts[index] for index in range(len(texts))]
    starts = [max(1, list(row["loss_mask"]).index(1)) for row in written]
    rounds = simulate_acceptance(drafter, target, [row["input_ids"] for row in written], starts)
    mean, stats = estimate_mean(rounds).to_dict(), DecodingStats(drafter.config.num_draft_tokens, rows=rounds)
    figures = {
        "tokens_seen": trained.tokens,
        "parameters": drafter.num_parameters(),
        "saved_bytes": sum(path.stat().st_size for path in folder.glob("*model*.safetensors")),
        "base_loss": losses["eval_base_loss"],
        "corrected_loss": losses["eval_corrected_loss"],
        "acceptance_length": mean["mean"],
        "acceptance_error": mean["error"],
        "num_rounds": stats.num_rounds,
        "num_texts": len(rounds),
        "acceptance_rate_at": [round(rate, 6) for rate in stats.acceptance_rate_at],
        **spent,
    }
    with Path(job["train_file"]).open(encoding="utf-8") as file:
        settings = {"rows": sum(1 for _ in file)}
    return Result(path.parent.name, settings, figures, provenance())


def main(path: Path) -> None:
    """Run the job of a folder, and leave its result there."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    result = run_job(path)
    bad = [name for name, value in result.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        remedy = f"lower the learning rates of {path.parent.name}"
        raise ValueError(f"{bad[0]} must be finite, got {result[bad[0]]}: {remedy}.")
    (path.parent / RESULT_FILE).write_text(result.to_line(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

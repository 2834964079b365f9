"""One run of a study: train a variant, walk rounds over held-out text, and leave a row."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel, set_seed

from hf_domino._common.provenance import provenance
from hf_domino.data.rows import RowDataset, load_rows
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.stats import DecodingStats
from hf_domino.evaluation.check.estimate import estimate_mean
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.evidence.acceptance import walk_acceptance
from hf_domino.training.fields import DataArguments, DrafterArguments, ModelArguments
from hf_domino.training.hidden_states.command import with_states
from hf_domino.training.loading import TrainingRows
from hf_domino.training.parts import OF_A_HEAD, add_head
from hf_domino.training.run import build_drafter, equip
from hf_domino.training.trainer import DominoTrainer

GROUPS = (ModelArguments, DrafterArguments, DataArguments, DominoTrainingArguments)
WEIGHTS = "model.safetensors"
JOB_FILE, ROW_FILE = "job.json", "row.json"
# What a study's file leaves out: as when the first rows were made, so that rows can be compared.
LEFT_OUT = {"learning_rate": 6e-4, "muon_learning_rate": None, "distillation_weight": 0.0}
# No checkpoints: a run that is killed starts again. Rounds are walked here, with what the row needs of them.
ALWAYS = {
    "report_to": "none",
    "save_strategy": "no",
    "walk_rows": 0,
    "disable_tqdm": True,
    "logging_steps": 20,
}


@dataclass(frozen=True)
class Job:
    """What a run is told.

    Args:
        fields (`dict`): Of a training, as for `hf-domino train`, `output_dir` among them.
        backbone (`str`, *optional*): Folder of a drafter whose backbone is taken over and frozen.
        row (`dict`): What the study knows of the run; the row begins with it.
    """

    fields: dict[str, Any]
    backbone: str | None
    row: dict[str, Any]

    @property
    def folder(self) -> Path:
        """Where weights and row go."""
        return Path(self.fields["output_dir"])

    def write(self) -> Path:
        """Put the job into its folder, in place of what an earlier run left there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        path = self.folder / JOB_FILE
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path


def run_job(job: Job) -> dict[str, Any] | None:
    """Train what a job says and measure it; its row, or None where SIGTERM ended the training early."""
    part = {"train_only": "head"} if job.backbone else {}
    left_out = LEFT_OUT if job.fields.get("drafter") else {**LEFT_OUT, "pure_draft_prefix_len": 0}
    names, shape, data, args = HfArgumentParser(GROUPS).parse_dict(left_out | job.fields | ALWAYS | part)
    tokenizer = AutoTokenizer.from_pretrained(names.target)
    target = AutoModelForCausalLM.from_pretrained(names.target, dtype=names.target_dtype).eval()
    set_seed(args.seed)
    drafter = build_drafter(names, shape, target, tokenizer)
    rows, texts = (load_rows(file, tokenizer, args.max_length) for file in (data.train_file, data.eval_file))
    if job.backbone:
        head = {name: getattr(drafter.config, name) for name in OF_A_HEAD}
        drafter = add_head(DominoDraftModel.from_pretrained(job.backbone, dtype=torch.float32), head)
    elif names.drafter is None:
        equip(drafter, target, rows, names, args)
    read = TrainingRows(rows, texts)
    if names.cache_hidden_states:
        # The first of the runs that share them writes them.
        with FileLock(f"{names.cache_hidden_states}.lock"):
            _, read = with_states(target, drafter.config, read, names, args)
    trainer = DominoTrainer(
        drafter, target, args, train_dataset=read.train, eval_dataset=read.evaluation, processing_class=tokenizer
    )
    clock, cpu_clock = time.perf_counter(), time.process_time()
    trainer.train()
    spent = {"seconds": time.perf_counter() - clock, "cpu_seconds": time.process_time() - cpu_clock}
    if trainer.stopped_by_signal:
        return None
    losses = trainer.evaluate()
    trainer.save_model()
    # What is saved is what is measured.
    drafter = DominoDraftModel.from_pretrained(args.output_dir, dtype=torch.float32)
    figures = {name: losses[f"eval_{name}"] for name in ("base_loss", "corrected_loss")}
    counts = {"rows": len(rows), "tokens_seen": trainer.state.num_input_tokens_seen}
    counts["parameters"] = sum(weight.numel() for weight in drafter.parameters())
    return job.row | counts | figures | walked(drafter, target, texts) | spent | provenance(str(args.device))


def walked(drafter: DominoDraftModel, target: PreTrainedModel, texts: RowDataset) -> dict[str, Any]:
    """Rounds of greedy generation over held-out text.

    Returns:
        `dict`: `acceptance_length` with half the width of its 95 % interval over texts, the number of rounds and texts,
        and `acceptance_rate_at`: the share of rounds that accepted each position.
    """
    rows = [texts[index] for index in range(len(texts))]
    starts = [max(1, list(row["loss_mask"]).index(1)) for row in rows]
    rounds = walk_acceptance(drafter, target, [row["input_ids"] for row in rows], starts)
    mean, stats = estimate_mean(rounds).to_dict(), DecodingStats(drafter.config.num_draft_tokens, rows=rounds)
    return {
        "acceptance_length": mean["mean"],
        "acceptance_error": mean["error"],
        "num_rounds": stats.num_rounds,
        "num_texts": len(rows),
        "acceptance_rate_at": [round(rate, 6) for rate in stats.acceptance_rate_at],
    }


def main() -> int:
    """Run the job of a folder in a process of its own; 143 where SIGTERM ended it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    row = run_job(job)
    if row is None:
        return 143
    row = {name: round(value, 6) if isinstance(value, float) else value for name, value in row.items()}
    bad = [name for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        raise ValueError(
            f"{bad[0]} must be finite, got {row[bad[0]]}: lower the learning rates of {job.row['variant']}."
        )
    (job.folder / ROW_FILE).write_text(json.dumps(row), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

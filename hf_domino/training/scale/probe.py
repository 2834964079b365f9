"""A few steps of a training, to see how fast they are: with its settings, its first rows, and nothing left behind.

The trainer is the one that will train, in a folder of its own that is deleted. Over these steps the curriculum falls as
it will over all.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, PrinterCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_domino._common.notices import silent
from hf_domino.data.rows import load_rows
from hf_domino.kinds.view import UNUSED
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import DataArguments, DrafterArguments, ModelArguments
from hf_domino.training.hidden_states.command import CachedRun, load_target
from hf_domino.training.loading import TrainingRows, source_of
from hf_domino.training.parts import check_start
from hf_domino.training.run import build_drafter
from hf_domino.training.trainer import DominoTrainer

WARM_UP = 2  # steps that are not counted: memory is taken, kernels are chosen
ENOUGH = 30.0  # seconds of counted steps, after which there are no more
PACKED = 32  # records that are read for a packed row


@dataclass(frozen=True)
class MeasuredSteps:
    """How fast a training is.

    Args:
        num_steps (`int`): Steps that were counted.
        seconds_per_step (`float`): Of an optimizer step: rows, target, drafter, optimizer.
        anchors_per_step (`float`): Blocks that are trained in one; rows may hold fewer than `num_anchors`.
        rows_per_step (`int`): Rows of one.
    """

    num_steps: int
    seconds_per_step: float
    anchors_per_step: float
    rows_per_step: int


def measure_steps(
    names: ModelArguments, shape: DrafterArguments, data: DataArguments, args: DominoTrainingArguments, num_steps: int
) -> MeasuredSteps:
    """Train a few steps and forget them: no file, no weight and no generator of random numbers is changed.

    Args:
        names, shape, data, args: Of the training; its text is there, and one process runs it.
        num_steps (`int`): Steps to count, or fewer where they take long.

    Raises:
        ValueError: As the training itself would.
    """
    check_start(names.drafter, shape.overrides(), args)
    with TemporaryDirectory() as folder, _as_before(args.device), silent():
        trainer = _trainer(Path(folder), names, shape, data, args, num_steps)
        trainer.train()
    first, *_, last = trainer.starts[WARM_UP:]
    num_steps = len(trainer.starts) - WARM_UP - 1
    anchors = torch.stack(trainer.anchors[WARM_UP : WARM_UP + num_steps]).float().mean().item()
    return MeasuredSteps(num_steps, (last - first) / num_steps, anchors, _rows_per_step(args))


class _ClockedTrainer(DominoTrainer):
    """Notes when each step begins, and how many blocks it trains."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.starts: list[float] = []
        self.anchors: list[torch.Tensor] = []

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Fetch a step's batches; the device has done what was asked of it before."""
        if self.args.device.type != "cpu":
            torch.accelerator.synchronize(self.args.device)
        self.starts.append(time.perf_counter())
        counted = self.starts[WARM_UP:]
        if len(counted) > 1 and counted[-1] - counted[0] > ENOUGH:
            self.control.should_training_stop = True
            return [], torch.zeros(())
        batches, total = super().get_batch_samples(*args, **kwargs)
        if batches:
            self.anchors.append(torch.stack([(batch["anchors"] != UNUSED).sum() for batch in batches]).sum())
        return batches, total


def _trainer(
    folder: Path,
    names: ModelArguments,
    shape: DrafterArguments,
    data: DataArguments,
    args: DominoTrainingArguments,
    num_steps: int,
) -> _ClockedTrainer:
    """A trainer for these steps and one more, whose beginning ends the last one's time."""
    args = _quiet(args, folder, WARM_UP + num_steps + 1)
    tokenizer = AutoTokenizer.from_pretrained(names.target)
    target = load_target(names, args)
    drafter = build_drafter(names, shape, target, tokenizer)
    most = _rows_per_step(args) * (args.max_steps + 1) * (PACKED if args.packing else 1)
    data = replace(data, max_train_rows=min(most, data.max_train_rows or most))
    source, vocab_size = source_of(data, "train"), target.config.get_text_config(decoder=True).vocab_size
    assert source is not None
    rows = load_rows(
        source, tokenizer, args.max_length, vocab_size, data.max_train_rows, args.template_kwargs, is_cached=False
    )
    read: Any = rows
    if names.cache_hidden_states:
        cache = CachedRun(replace(names, cache_hidden_states=str(folder / "states")), args)
        target, cached = cache.attach(target, drafter.config, TrainingRows(rows, None))
        read = cached.train
    trainer = _ClockedTrainer(drafter, target, args, train_dataset=read, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    trainer.stop_signals = ()  # there is nothing to save
    return trainer


def _quiet(args: DominoTrainingArguments, folder: Path, num_steps: int) -> DominoTrainingArguments:
    """The arguments of so many steps that say, save and evaluate nothing."""
    args = copy.copy(args)
    args.output_dir, args.max_steps = str(folder), num_steps
    args.save_strategy, args.eval_strategy = SaveStrategy.NO, IntervalStrategy.NO
    args.logging_strategy, args.report_to, args.disable_tqdm = IntervalStrategy.NO, [], True
    args.load_best_model_at_end = args.push_to_hub = False
    return args


def _rows_per_step(args: DominoTrainingArguments) -> int:
    return args.train_batch_size * args.gradient_accumulation_steps


@contextmanager
def _as_before(device: torch.device) -> Iterator[None]:
    """Leave the generators of random numbers as they were."""
    state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)

"""What a training takes, from a few real steps of it: with its settings and its first rows, and nothing left behind."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from transformers import PrinterCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_domino._common.notices import silent
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import DataArguments, DrafterArguments, ModelArguments
from hf_domino.training.run import check_fields, make_trainer

STEPS, WARM_UP = 5, 2  # steps that are timed, behind those in which memory is taken and kernels are chosen
PACKED = 32  # records that are read for a packed row


def measure_steps(
    names: ModelArguments, shape: DrafterArguments, data: DataArguments, args: DominoTrainingArguments
) -> dict[str, float]:
    """Train a few steps in a folder that is deleted, and say what they took; errors are those of the training.

    Returns:
        `dict[str, float]`: `seconds_per_step` of an optimizer step (rows, target, drafter, optimizer), its
        `rows_per_step` of this process, `memory_gb` (of a GPU the most that was taken, of a CPU what the process has at
        the end), and where all rows or the number of steps are known, `steps` of the whole training and `hours` for
        them, without evaluations and checkpoints.
    """
    check_fields(names, shape, data, args)
    steps, args = args.max_steps, copy.copy(args)
    args.max_steps, args.load_best_model_at_end, args.push_to_hub = WARM_UP + STEPS, False, False
    args.save_strategy, args.eval_strategy = SaveStrategy.NO, IntervalStrategy.NO
    args.resume_from_checkpoint = None
    args.logging_strategy, args.logging_steps, args.report_to, args.disable_tqdm = IntervalStrategy.STEPS, 1, [], True
    rows_per_step, data = args.train_batch_size * args.gradient_accumulation_steps, replace(data, eval_file=None)
    with TemporaryDirectory() as folder, silent():
        args.output_dir = folder
        if names.cache_hidden_states:  # which would be written of all rows
            most = rows_per_step * args.world_size * args.max_steps * (PACKED if args.packing else 1)
            data.max_train_rows = min(most, data.max_train_rows or most)
            names = replace(names, cache_hidden_states=str(Path(folder, "states")))
        trainer, _ = make_trainer(names, shape, data, args)
        assert trainer is not None
        trainer.remove_callback(PrinterCallback)
        trainer.stop_signals = ()  # there is nothing to save
        trainer.train()
    if steps <= 0 and names.cache_hidden_states is None:
        steps = math.ceil(args.num_train_epochs * len(trainer.train_dataset) / (rows_per_step * args.world_size))
    hours = [entry["hours"] for entry in trainer.state.log_history if "hours" in entry]  # logs wait for the device
    seconds = (hours[-1] - hours[WARM_UP - 1]) * 3600 / STEPS
    device = args.device
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
    measured = {"seconds_per_step": seconds, "rows_per_step": rows_per_step, "memory_gb": memory / 1e9}
    return measured | ({"steps": steps, "hours": seconds * steps / 3600} if steps > 0 else {})

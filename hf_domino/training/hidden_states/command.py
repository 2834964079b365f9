"""What `--cache-hidden-states` makes of a run: rows that carry states, and as much of the target as is still used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_domino.configuration import DominoConfig
from hf_domino.target.identity import stand_for
from hf_domino.target.loading import AutoTarget
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import ModelArguments
from hf_domino.training.hidden_states.folder import StateSettings
from hf_domino.training.hidden_states.reading import CachedRows, has_all
from hf_domino.training.hidden_states.writing import StateWriter
from hf_domino.training.loading import TrainingRows
from hf_domino.training.scale.placing import files_digest, is_in_memory, load_ends, place_target


def load_target(names: ModelArguments, args: DominoTrainingArguments) -> PreTrainedModel:
    """Load all of the target that a run names, frozen, to where it is told to lie.

    Args:
        names (`ModelArguments`): For `target` and `target_dtype`.
        args (`DominoTrainingArguments`): For the device.
    """
    target = AutoTarget.from_pretrained(names.target, dtype=names.target_dtype)
    # Where it is to be divided, no device need hold it whole.
    return target.eval() if args.shard_target else place_target(target, args.device)


def whole_target(target: PreTrainedModel, names: ModelArguments, args: DominoTrainingArguments) -> PreTrainedModel:
    """All of the target, loaded where no more than its ends were.

    Args:
        target (`PreTrainedModel`): All of it, or its ends.
        names, args: As for [`load_target`].
    """
    return target if is_in_memory(target) else load_target(names, args)


class CachedRun:
    """The folder of hidden states of a run.

    Args:
        names (`ModelArguments`): For the target, and the folder.
        args (`DominoTrainingArguments`): Of the run.
    """

    def __init__(self, names: ModelArguments, args: DominoTrainingArguments):
        assert names.target is not None
        assert names.cache_hidden_states is not None
        self.folder, self.names, self.args = Path(names.cache_hidden_states), names, args
        self.files, self.final = files_digest(names.target), args.distillation_weight > 0

    def load_target(self) -> PreTrainedModel:
        """The target's ends where its states were written before, else all of it."""
        settings = StateSettings.load(self.folder)
        is_same = settings is not None and self.files is not None and settings.target_files == self.files
        ends = self._load_ends() if is_same else None
        return load_target(self.names, self.args) if ends is None else ends

    def writer(self, target: PreTrainedModel, config: DominoConfig) -> StateWriter:
        """What writes hidden states to the folder, under the autocast of the training.

        Args:
            target (`PreTrainedModel`): All of the target.
            config (`DominoConfig`): Of the drafter.
        """
        shard = (self.args.process_index, self.args.world_size)
        return StateWriter(
            target, config, self.folder, self.names.cache_dtype, self.final, self.files, _autocast(self.args), shard
        )

    def attach(
        self, target: PreTrainedModel, config: DominoConfig, rows: TrainingRows
    ) -> tuple[PreTrainedModel, TrainingRows]:
        """Write the states that are missing, let rows carry theirs, and keep no more of the target than its ends.

        Args:
            target (`PreTrainedModel`): All of it, or its ends.
            config (`DominoConfig`): Of the drafter.
            rows (`TrainingRows`): Of training and evaluation.

        Returns:
            `tuple[PreTrainedModel, TrainingRows]`: The target's ends, or all of it where they cannot be loaded alone,
            and the rows with their states.
        """
        target, rows = self.read_rows(target, config, rows)
        ends = self._load_ends() if is_in_memory(target) and self.files is not None else None
        return ends or target, rows

    def read_rows(
        self, target: PreTrainedModel, config: DominoConfig, rows: TrainingRows
    ) -> tuple[PreTrainedModel, TrainingRows]:
        """Write the states that are missing, and let rows carry theirs.

        Args:
            target, config, rows: As for [`~CachedRun.attach`].

        Returns:
            `tuple[PreTrainedModel, TrainingRows]`: The target, all of it where states had to be written, and the rows
            with their states.
        """
        datasets = [part for part in (rows.train, rows.evaluation) if part is not None]
        if not all(has_all(self.folder, part) for part in datasets):
            target = whole_target(target, self.names, self.args)
            writer = self.writer(target, config)
            for part in datasets:
                writer.write(part, progress=self.args.process_index == 0)
        self.args.distributed_state.wait_for_everyone()
        cached = [CachedRows(part, self.folder, target, config, self.final, self.files) for part in datasets]
        return target, TrainingRows(cached[0], cached[1] if rows.evaluation is not None else None)

    def _load_ends(self) -> PreTrainedModel | None:
        assert self.names.target is not None
        ends = load_ends(self.names.target, self.names.target_dtype, self.args.device)
        settings = StateSettings.load(self.folder)
        if ends is not None and settings is not None:
            stand_for(ends, settings.target)
        return ends


def _autocast(args: DominoTrainingArguments) -> Callable[[], AbstractContextManager]:
    if not (args.bf16 or args.fp16):
        return nullcontext
    return partial(torch.autocast, args.device.type, dtype=torch.bfloat16 if args.bf16 else torch.float16)

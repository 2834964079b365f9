"""`--cache-hidden-states` in a run: rows that carry states, and as much of the target as is still used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.configuration import DominoConfig
from hf_domino.target.identity import stand_for
from hf_domino.target.loading import AutoTarget
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import ModelArguments
from hf_domino.training.hidden_states.folder import StateSettings, find_rows
from hf_domino.training.hidden_states.reading import CachedRows, keys_of
from hf_domino.training.hidden_states.writing import StateWriter
from hf_domino.training.scale.placing import files_digest, is_in_memory, load_ends, place_target


def load_target(names: ModelArguments, args: DominoTrainingArguments) -> PreTrainedModel:
    """Load the target that a run names, frozen; its ends alone where its states were written before."""
    return _load_ends(names, args) or whole_target(None, names, args)


def whole_target(
    target: PreTrainedModel | None, names: ModelArguments, args: DominoTrainingArguments
) -> PreTrainedModel:
    """All of the target, loaded where no more than its ends were."""
    if target is not None and is_in_memory(target):
        return target
    target = AutoTarget.from_pretrained(names.target, dtype=names.target_dtype)
    # Where it is to be divided, no device need hold it whole.
    return target if args.shard_target else place_target(target, args.device)


def with_states(
    target: PreTrainedModel,
    config: DominoConfig,
    rows: Sequence[Any],
    names: ModelArguments,
    args: DominoTrainingArguments,
) -> tuple[PreTrainedModel, list[CachedRows | None]]:
    """Write the states that are missing, let rows carry theirs, and keep no more of the target than its ends."""
    folder, final = Path(str(names.cache_hidden_states)), args.distillation_weight > 0
    datasets = [part for part in rows if part is not None]
    known = find_rows(folder) if StateSettings.load(folder) else {}
    if any(key not in known for part in datasets for key, _ in keys_of(part)):
        target = whole_target(target, names, args)
        dtype = torch.bfloat16 if args.bf16 else torch.float16
        autocast = partial(torch.autocast, args.device.type, dtype=dtype, enabled=args.bf16 or args.fp16)
        shard = (args.process_index, args.world_size)
        files = files_digest(str(names.target))
        writer = StateWriter(target, config, folder, names.cache_dtype, final, files, autocast, shard)
        for part in datasets:
            writer.write(part, progress=args.process_index == 0)
    args.distributed_state.wait_for_everyone()
    cached = [None if part is None else CachedRows(part, folder, target, config, final) for part in rows]
    ends = _load_ends(names, args) if is_in_memory(target) else None
    return ends or target, cached


def _load_ends(names: ModelArguments, args: DominoTrainingArguments) -> PreTrainedModel | None:
    """The target's embeddings and lm_head, where states of its files are kept and they can be loaded alone."""
    name = str(names.target)
    settings = StateSettings.load(Path(names.cache_hidden_states)) if names.cache_hidden_states else None
    if settings is None or settings.target_files is None or settings.target_files != files_digest(name):
        return None
    ends = load_ends(name, names.target_dtype, args.device)
    if ends is not None:
        stand_for(ends, settings.target)
    return ends

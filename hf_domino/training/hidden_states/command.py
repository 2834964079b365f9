"""`--cache-hidden-states` in a run: rows carry states, and of the target no more than its ends stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.configuration import DominoConfig
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import ModelArguments
from hf_domino.training.hidden_states.reading import CachedRows
from hf_domino.training.hidden_states.writing import StateWriter


def with_states(
    target: PreTrainedModel,
    config: DominoConfig,
    rows: Sequence[Any],
    names: ModelArguments,
    args: DominoTrainingArguments,
) -> list[CachedRows | None]:
    """Write the states that are missing, let rows carry theirs, and keep the target's ends alone on the device."""
    folder, final = Path(str(names.cache_hidden_states)), args.distillation_weight > 0
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    autocast = partial(torch.autocast, args.device.type, dtype=dtype, enabled=args.bf16 or args.fp16)
    shard = (args.process_index, args.world_size)
    writer = StateWriter(target, config, folder, names.cache_dtype, final, autocast, shard)
    for part in rows:
        if part is not None:
            writer.write(part, progress=args.process_index == 0)
    args.distributed_state.wait_for_everyone()
    cached = [None if part is None else CachedRows(part, folder, target, config, final) for part in rows]
    if not getattr(target, "is_quantized", False):  # which stays where it was loaded
        target.cpu()
        for end in (target.get_input_embeddings(), target.get_output_embeddings()):
            end.to(args.device)
    return cached

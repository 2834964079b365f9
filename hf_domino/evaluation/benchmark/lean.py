"""The floor of plain generation: one forward, the processors, one token, and nothing else.

Transformers' own loop prepares its inputs anew for every token. What that costs is no merit of a drafter, so speed-ups
are given over both.

Shapes: B batch, T prompt tokens, N new tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_domino._common.cache_name import CACHE


def lean_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Generate the tokens of plain `generate` as its `custom_generate`, without its bookkeeping: `[B, T + N]`."""
    # Stops at end-of-text tokens and at the length. Of `model_kwargs`, cache and attention mask are used.
    start, end = input_ids.shape[1], int(generation_config.max_length)
    eos, pad = generation_config._eos_token_tensor, generation_config._pad_token_tensor
    ids = torch.cat((input_ids, input_ids.new_zeros(len(input_ids), end - start)), dim=1)  # [B, T + N]
    given = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if given is None else given
    mask = torch.cat((mask, mask.new_ones(len(ids), end - start)), dim=1)  # [B, T + N]
    positions = (mask.long().cumsum(dim=1) - 1).clamp_min(0)
    takes = inspect.signature(model.forward).parameters
    is_running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    every, read, written = checks_every(ids.device), 0, torch.tensor(start, device=ids.device)
    for position in range(start, end):
        inputs = {
            "attention_mask": None if given is None else mask[:, :position],
            "position_ids": positions[:, read:position],
            CACHE: model_kwargs.get(CACHE),
            "use_cache": True,
            "logits_to_keep": 1,
        }
        taken = {name: value for name, value in inputs.items() if name in takes}
        logits = model(input_ids=ids[:, read:position], **taken).logits[:, -1]  # [B, V]
        read = position
        scores = logits_processor(ids[:, :position], logits.float())
        if generation_config.do_sample:
            token = torch.multinomial(scores.softmax(dim=-1), num_samples=1)[:, 0]
        else:
            token = scores.argmax(dim=-1)
        written += is_running.any()
        if eos is not None:
            token = torch.where(is_running, token, pad)
            is_running = is_running & ~torch.isin(token, eos)
        ids[:, position] = token
        if eos is not None and (position - start) % every == every - 1 and not bool(is_running.any()):
            break
    return ids[:, : int(written)]


def checks_every(device: torch.device) -> int:
    """Tokens between two looks at which rows are finished: a look makes the host wait for its device."""
    return 1 if device.type == "cpu" else 8

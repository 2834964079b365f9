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
from transformers.generation.streamers import BaseStreamer

from hf_domino._common.cache_name import CACHE


def lean_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor:
    """Generate greedily or by sampling; pass it as `custom_generate`. Stops at end-of-text tokens and at the length.

    Args:
        model (`PreTrainedModel`): A decoder-only model.
        input_ids (`torch.Tensor`): Prompts `[B, T]`, padded on the left.
        logits_processor (`LogitsProcessorList`): Processors and warpers that `generate` prepared.
        stopping_criteria (`StoppingCriteriaList`): Not asked; the configuration says where to stop.
        generation_config (`GenerationConfig`): Likewise prepared.
        token_streamer (`BaseStreamer`, *optional*): Receives every token.
        model_kwargs: Cache and attention mask are used.

    Returns:
        `torch.Tensor`: Prompts and new tokens `[B, T + N]`, the tokens of plain `generate`.
    """
    forward = _Forward(model, input_ids, generation_config, model_kwargs)
    start, end = input_ids.shape[1], int(generation_config.max_length)
    eos = getattr(generation_config, "_eos_token_tensor", None)
    pad = getattr(generation_config, "_pad_token_tensor", None)
    ids = torch.cat((input_ids, input_ids.new_zeros(len(input_ids), end - start)), dim=1)  # [B, T + N]
    is_running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    every = checks_every(ids.device)
    new_ids = input_ids
    for position in range(start, end):
        scores = logits_processor(ids[:, :position], forward(new_ids, position).float())  # [B, V]
        if generation_config.do_sample:
            token = torch.multinomial(scores.softmax(dim=-1), num_samples=1)[:, 0]
        else:
            token = scores.argmax(dim=-1)
        if eos is not None:
            token = token if pad is None else torch.where(is_running, token, pad)
            is_running = is_running & ~torch.isin(token, eos)
        ids[:, position] = token
        new_ids = token[:, None]
        if token_streamer is not None:
            token_streamer.put(token.cpu())
        if eos is not None and (position - start) % every == every - 1 and not bool(is_running.any()):
            break
    return ids[:, : start + _length(ids[:, start : position + 1], eos)]


def checks_every(device: torch.device) -> int:
    """Tokens between two looks at which rows are finished: a look makes the host wait for its device."""
    return 1 if device.type == "cpu" else 8


def _length(new_ids: torch.Tensor, eos: torch.Tensor | None) -> int:
    """How many of the new tokens `[B, N]` stand before the end of the row that ends last, that end included."""
    if eos is None:
        return new_ids.shape[1]
    going_on = (~torch.isin(new_ids, eos)).long().cumprod(dim=1).sum(dim=1)  # tokens before a row's end
    return min(int(going_on.max()) + 1, new_ids.shape[1])


class _Forward:
    """The target's forward with the few inputs that change from token to token."""

    def __init__(self, model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, kwargs: Any):
        parameters = inspect.signature(model.forward).parameters
        self.takes = set(parameters)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            self.takes |= {"position_ids", CACHE, "attention_mask", "use_cache"}
        self.model, self.cache = model, kwargs.get(CACHE)
        self.mask, length = kwargs.get("attention_mask"), int(config.max_length)
        counted = torch.arange(length, device=input_ids.device).expand(len(input_ids), -1)
        if self.mask is not None:
            behind = self.mask.new_ones(len(input_ids), length - input_ids.shape[1])
            self.mask = torch.cat((self.mask, behind), dim=1)  # [B, T + N]
            counted = (self.mask.long().cumsum(dim=1) - 1).clamp_min(0)
        self.positions = counted

    def __call__(self, new_ids: torch.Tensor, end: int) -> torch.Tensor:
        """Logits `[B, V]` of the token at position `end`, after the new ids `[B, n]` that stand right before it."""
        inputs = {
            "attention_mask": None if self.mask is None else self.mask[:, :end],
            "position_ids": self.positions[:, end - new_ids.shape[1] : end],
            CACHE: self.cache,
            "use_cache": True,
            "logits_to_keep": 1,
        }
        taken = {name: value for name, value in inputs.items() if name in self.takes}
        outputs = self.model(input_ids=new_ids, **taken)
        return outputs.logits[:, -1]

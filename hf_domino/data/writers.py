"""Who writes: the target in this process, continuing a batch of prompts under one seed.

A writer is what has `write` as [`TargetWriter`] has it; another is the endpoint of a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from hf_domino._common.cache_name import CACHE
from hf_domino.target.view import input_device

# Truncation that a target's generation configuration may ask for, switched off.
UNTRUNCATED = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
NO_MIN_P = {"min_p": 0.0}  # only in place of another: `generate` makes a pass over the vocabulary for it
# What a target's generation configuration may count from where a call of `generate` began.
FROM_THE_START = ("min_new_tokens", "exponential_decay_length_penalty", "begin_suppress_tokens", "max_time")
CHUNK = 32  # tokens between looks at which rows have ended: each costs about one step
NO_ROUND_TRIP = "no round trip"  # of a text, to token ids and back
SEED_STRIDE = 1_000_003  # between runs, so that their batches do not share seeds


@dataclass(frozen=True)
class Sampling:
    """How a text is written.

    Args:
        max_new_tokens (`int`): Longest text.
        temperature (`float`): 0 is greedy.
        top_p (`float`, *optional*, defaults to 1.0): Nucleus; 1 is the target's own law.
        ends (`tuple[int, ...]`, *optional*): Token ids that end a text; defaults to the target's own.
    """

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class Written:
    """A text as token ids, with the token that ends it where there is one."""

    ids: list[int]
    ended: bool


class Writer(Protocol):
    """Continues prompts."""

    def write(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> Sequence[Written | None]:
        """One text per prompt; None where it is not known as token ids."""


class TargetWriter:
    """The target in this process.

    Args:
        target (`PreTrainedModel`): In evaluation mode.
        bf16 (`bool`, *optional*, defaults to `False`): Write under bf16 autocast.
        chunk (`int`, *optional*): Tokens after which rows that have ended leave the batch, so that a few long texts do
            not hold up all others. By default they stay. It is part of what a seed stands for.
    """

    def __init__(self, target: PreTrainedModel, bf16: bool = False, chunk: int | None = None):
        config = target.generation_config
        starts_count = any(getattr(config, name, None) for name in FROM_THE_START)
        self.target, self.bf16, self.chunk = target, bf16, None if starts_count else chunk

    def write(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[Written]:
        """Continue a batch of prompts.

        Args:
            prompts (`list[list[int]]`): Token ids, none empty.
            sampling (`Sampling`): How; without a nucleus by the target's own law, whatever truncation its generation
                configuration asks for.
            seed (`int`): Of the sampling; torch's own random state is left as it was.

        Returns:
            `list[Written]`: Per prompt what follows it.
        """
        device = input_device(self.target)
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)
        with autocast, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            return self._continue(prompts, sampling)

    def _continue(self, prompts: list[list[int]], sampling: Sampling) -> list[Written]:
        config = self.target.generation_config
        pad_token_id = config.pad_token_id or 0
        ends = sampling.ends or ends_of(config)
        texts: list[list[int]] = [[] for _ in prompts]
        inputs: dict[str, Any] = _pad_left(prompts, max(map(len, prompts)), pad_token_id, input_device(self.target))
        rows, left = list(range(len(prompts))), sampling.max_new_tokens
        while rows and left:
            output = self.target.generate(
                **inputs,
                max_new_tokens=min(self.chunk or left, left),
                pad_token_id=pad_token_id,
                return_dict_in_generate=True,
                **_arguments(sampling, config),
            )
            new = output.sequences[:, inputs["input_ids"].shape[1] :]
            for row, ids in zip(rows, new.tolist(), strict=True):
                texts[row] += ids
            stay = [place for place, row in enumerate(rows) if not set(ends).intersection(texts[row])]
            left -= new.shape[1]
            if left and stay:
                inputs = _of_rows(stay, output, inputs["attention_mask"])
            rows = [rows[place] for place in stay]
        return [cut_at_end(ids, ends) for ids in texts]


def _of_rows(rows: list[int], output: Any, attention_mask: torch.Tensor) -> dict[str, Any]:
    """What `generate` needs to go on with some rows of its output."""
    index = torch.tensor(rows, device=attention_mask.device)
    cache = getattr(output, CACHE)
    cache.batch_select_indices(index)
    num_new = output.sequences.shape[1] - attention_mask.shape[1]
    mask = torch.nn.functional.pad(attention_mask[index], (0, num_new), value=1)
    return {"input_ids": output.sequences[index], "attention_mask": mask, CACHE: cache}


def _arguments(sampling: Sampling, config: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        untruncated = UNTRUNCATED if getattr(config, "min_p", None) is None else UNTRUNCATED | NO_MIN_P
        arguments |= {"temperature": sampling.temperature, **untruncated, "top_p": sampling.top_p}
    return arguments | ({"eos_token_id": list(sampling.ends)} if sampling.ends else {})


def ends_of(generation_config: Any) -> tuple[int, ...]:
    """Token ids that end a text of a target, as its generation configuration has them; possibly none."""
    ends = generation_config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)


def cut_at_end(ids: list[int], ends: tuple[int, ...]) -> Written:
    """A text up to and with its first end."""
    length = next((index + 1 for index, token in enumerate(ids) if token in ends), None)
    return Written(ids[:length], length is not None)


def _pad_left(
    prompts: list[list[int]], length: int, pad_token_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    padding = [length - len(prompt) for prompt in prompts]
    ids = [[pad_token_id] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
    seen = [[0] * count + [1] * len(prompt) for count, prompt in zip(padding, prompts, strict=True)]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(seen, device=device)}

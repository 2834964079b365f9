"""Who writes: the target in this process, continuing a batch of prompts under one seed.

A writer is what has `write` as [`TargetWriter`] has it; another is the endpoint of a server.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

# Truncation that a target's generation configuration may ask for, switched off.
UNTRUNCATED = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
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

    def write(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[Written | None]:
        """One text per prompt; None where it is not known as token ids."""


class TargetWriter:
    """The target in this process.

    Args:
        target (`PreTrainedModel`): In evaluation mode.
        bf16 (`bool`, *optional*, defaults to `False`): Write under bf16 autocast.
    """

    def __init__(self, target: PreTrainedModel, bf16: bool = False):
        self.target, self.bf16 = target, bf16

    def write(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[Written | None]:
        """Continue a batch of prompts.

        Args:
            prompts (`list[list[int]]`): Token ids, none empty.
            sampling (`Sampling`): How; without a nucleus by the target's own law, whatever truncation its generation
                configuration asks for.
            seed (`int`): Of the sampling; torch's own random state is left as it was.

        Returns:
            `list[Written]`: Per prompt what follows it.
        """
        target, longest = self.target, max(map(len, prompts))
        pad_token_id = target.generation_config.pad_token_id or 0
        autocast = torch.autocast(target.device.type, torch.bfloat16, enabled=self.bf16)
        with autocast, torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(seed)
            generated = target.generate(
                **_pad_left(prompts, longest, pad_token_id, target.device),
                max_new_tokens=sampling.max_new_tokens,
                pad_token_id=pad_token_id,
                **_arguments(sampling),
            )
        ends = sampling.ends or ends_of(target.generation_config)
        return [cut_at_end(row, ends) for row in generated[:, longest:].tolist()]


def _arguments(sampling: Sampling) -> dict[str, Any]:
    arguments: dict[str, Any] = {"do_sample": sampling.temperature > 0}
    if sampling.temperature > 0:
        arguments |= {"temperature": sampling.temperature, **UNTRUNCATED, "top_p": sampling.top_p}
    return arguments | ({"eos_token_id": list(sampling.ends)} if sampling.ends else {})


def ends_of(generation_config: Any) -> tuple[int, ...]:
    """Token ids that end a text of a target, as its generation configuration has them; possibly none."""
    ends = generation_config.eos_token_id
    return () if ends is None else tuple(ends) if isinstance(ends, (list, tuple)) else (ends,)


def cut_at_end(ids: list[int], ends: tuple[int, ...]) -> Written:
    """A text up to and with its first end.

    Args:
        ids (`list[int]`): What was generated, padding behind it.
        ends (`tuple[int, ...]`): Token ids that end a text.
    """
    length = next((index + 1 for index, token in enumerate(ids) if token in ends), None)
    return Written(ids[:length], length is not None)


def fast_dtype(device: str) -> torch.dtype:
    """Dtype to write in: bf16 on a GPU and on CPUs with instructions for it, else fp32.

    Args:
        device (`str`): Where the target is to write.
    """
    if device != "cpu":
        return torch.bfloat16
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer than the oldest torch
    return torch.bfloat16 if any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else torch.float32


def _pad_left(
    prompts: list[list[int]], length: int, pad_token_id: int, device: torch.device
) -> dict[str, torch.Tensor]:
    padding = [length - len(prompt) for prompt in prompts]
    ids = [[pad_token_id] * count + prompt for count, prompt in zip(padding, prompts, strict=True)]
    seen = [[0] * count + [1] * len(prompt) for count, prompt in zip(padding, prompts, strict=True)]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(seen, device=device)}

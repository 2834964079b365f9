"""What a round costs on this device in steps of the target alone, and the speed-up that follows from it.

A round costs the same whatever its drafter accepts, so it is measured with fresh weights: in the target's dtype, as
generation runs, wherever the trained ones are and whatever their masters' dtype.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList

from hf_domino.configuration import DominoConfig
from hf_domino.decoding.loop import assisted_decoding
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.phases import timed_phases

REPEATS, NUM_TOKENS, PROMPT_LENGTH = 5, 8, 64
# Arguments of `generate` for one greedy text, whatever the target's own configuration says.
GREEDY = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
Loop = Callable[..., Any]


class RoundCost(NamedTuple):
    """Medians, batch 1, behind a short prompt.

    Args:
        step (`float`): Seconds of a step of the target alone, one token.
        round (`float`): Seconds of a whole round: draft, rollout, verification, and what is between them.
    """

    step: float
    round: float

    def speed_up(self, acceptance_length: float) -> float:
        """Tokens a second over plain generation's, prefill aside.

        Args:
            acceptance_length (`float`): Tokens a round.

        Example:
        ```python
        >>> from hf_domino.training.evidence.speed import RoundCost
        >>> RoundCost(step=0.010, round=0.015).speed_up(3.0)
        2.0

        ```
        """
        return acceptance_length * self.step / self.round


@torch.no_grad()
def measure_round(
    target: PreTrainedModel, config: DominoConfig, prompt: Sequence[int], device: torch.device
) -> RoundCost:
    """Time single steps and rounds of whole blocks in turn, so that a slow moment of the machine hits both.

    Args:
        target (`PreTrainedModel`): The target.
        config (`DominoConfig`): The drafter's.
        prompt (`Sequence[int]`): Token ids to generate behind; the first 64 are used.
        device (`torch.device`): Where drafters and inputs are.
    """
    drafter = _fresh_drafter(config, target.dtype, device)
    ids = torch.tensor([prompt[:PROMPT_LENGTH]], device=device)
    steps, rounds = [], []
    for repeat in range(1 + REPEATS):
        ticks = _Ticks(ids.shape[1] + NUM_TOKENS)
        _generate(target, ids, plainly, ticks)
        with timed_phases():
            _generate(target, ids, assisted_decoding, MaxLengthCriteria(ticks.max_length), drafter=drafter)
        if repeat:  # the first one warms up
            steps.append(ticks.median())
            rounds.append(sum((drafter.stats.phases or {}).values()) / drafter.stats.num_rounds)
    return RoundCost(statistics.median(steps), statistics.median(rounds))


class _Ticks(MaxLengthCriteria):
    """Notes when it is asked, once a token; after every answer the device is waited for."""

    def __init__(self, max_length: int):
        super().__init__(max_length)
        self._times: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._times.append(time.perf_counter())
        return super().__call__(*args, **kwargs)

    def median(self) -> float:
        """Seconds between two tokens."""
        return statistics.median(after - before for before, after in pairwise(self._times))


def _fresh_drafter(config: DominoConfig, dtype: torch.dtype, device: torch.device) -> DominoDraftModel:
    config = copy.deepcopy(config)
    config.draft_length = "full"
    default = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.set_default_dtype(dtype)
        try:
            return DominoDraftModel(config).eval()
        finally:
            torch.set_default_dtype(default)


def _generate(target: PreTrainedModel, ids: torch.Tensor, loop: Loop, end: MaxLengthCriteria, **kwargs: Any) -> None:
    """Run a loop as `generate` prepares it, past the patch, and without an end of the text."""

    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
        ends = StoppingCriteriaList([end])
        return loop(model, input_ids, logits_processor, ends, generation_config, **kwargs, **model_kwargs)

    mask = torch.ones_like(ids)
    target.generate(ids, attention_mask=mask, custom_generate=decode, max_new_tokens=NUM_TOKENS, **GREEDY)


def plainly(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
    """Write as the target alone does, as a loop for `custom_generate`, past the patch."""
    # By place, as `generate` does not call it: so the patch leaves it alone.
    return model._sample(input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs)

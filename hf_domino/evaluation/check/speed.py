"""What a drafter is worth: a few prompts of a self-test, timed plain and assisted.

Acceptance alone does not say it, as the cost of a round in steps of the target is another on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from hf_domino.decoding.loop import assisted_decoding
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.evaluation.benchmark.timing import generate_timed
from hf_domino.evaluation.check.prompts import Prompt
from hf_domino.training.evidence.speed import GREEDY, plainly

TIMED_PROMPTS = 4  # which takes about as long as what is measured of them


def time_prompts(
    drafter: DominoDraftModel, target: PreTrainedModel, prompts: Sequence[Prompt], max_new_tokens: int
) -> list[float]:
    """Speed-up over plain generation on each of the first prompts, drafting as configured.

    The first is written once more before, so that the drafter knows what its rounds cost.
    """
    loops = plainly, partial(assisted_decoding, drafter=drafter.view())
    speed_ups = []
    for prompt in (prompts[0], *prompts[:TIMED_PROMPTS]):
        ids = prompt.input_ids.to(target.device)
        inputs, speeds = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, []
        for loop in loops:
            arguments = GREEDY | {"custom_generate": loop, "max_new_tokens": max_new_tokens}
            tokens, seconds = generate_timed(target, inputs, **arguments)
            speeds.append(tokens.shape[1] / seconds)
        speed_ups.append(speeds[1] / speeds[0])
    return speed_ups[1:]

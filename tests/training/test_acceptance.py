"""Walked acceptance equals what generation measures, entry by entry."""

from __future__ import annotations

import pytest
import torch

from hf_domino.integration.patch import install
from hf_domino.training.evidence.acceptance import mean_acceptance_length, simulate_acceptance

NUM_TOKENS = 24
KINDS = [
    {"shift_label": True, "pure_draft_prefix_len": 1},
    {"shift_label": False},
    {"projector_type": "dflash"},
    {"projector_type": "eagle3"},
    {"projector_type": "dspark", "markov_rank": 8},
    {"projector_type": "dfly", "shift_label": False},
    {"projector_type": "xpress", "num_jacobi_passes": 6},
    {"projector_type": "dflash2", "selector_rank": 8, "selector_top_k": 1, "conv_kernel_size": 2, "conv_group_size": 8},
]


@pytest.mark.parametrize(
    ("kind", "repetition_penalty"), [*zip(KINDS, (1.0, 1.2, 1.0, 1.0, 1.2, 1.2, 1.2, 1.0), strict=True)]
)
def test_walk_equals_generation(kind, repetition_penalty, target, make_drafter, make_trainer, greedy_rows):
    install()
    target.generation_config.repetition_penalty = repetition_penalty
    drafter = make_drafter(target, **kind)
    make_trainer(drafter, greedy_rows, max_steps=20).train()  # a drafter that accepts something
    drafter.eval()
    longer, found = drafter.config.num_draft_tokens, []
    for row in greedy_rows[:2]:
        start = row["loss_mask"].index(1)
        prompt = torch.tensor([row["input_ids"][:start]])
        # The walk needs to know the text behind the last round.
        text = target.generate(prompt, max_new_tokens=NUM_TOKENS + longer, do_sample=False)[0].tolist()
        assisted = target.generate(prompt, max_new_tokens=NUM_TOKENS, do_sample=False, assistant_model=drafter)
        assert assisted[0].tolist() == text[: start + NUM_TOKENS]
        (walked,) = simulate_acceptance(drafter, target, [text], [start])
        measured = drafter.stats.acceptance_lengths
        walked = walked[: len(measured)]
        walked[-1] -= sum(walked) - (NUM_TOKENS - 1)  # generation cuts its last round
        assert walked == measured
        found.append(walked)
    assert 1.1 < mean_acceptance_length(found) < longer


def test_rounds_that_reach_behind_the_text_are_left_out(target, make_drafter):
    drafter = make_drafter(target, block_size=6, shift_label=True).train()
    texts = [list(range(4, 14)), list(range(4, 15)), [5, 6]]
    assert list(map(len, simulate_acceptance(drafter, target, texts, [4, 4, 1]))) == [0, 1, 0]
    assert drafter.training
    assert mean_acceptance_length([[]]) is None

"""Own prefixes against a rollout step by step, and in a training."""

from __future__ import annotations

import pytest
import torch
from test_losses import KINDS

from hf_domino.target.view import TargetModel
from hf_domino.training.objective.own_prefixes import write_own_prefixes


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize(("kind", "at_once"), [(KINDS[0], 1), (KINDS[0], 2), (KINDS[3], 1)])
def test_chosen_blocks_hold_what_the_drafter_says_step_by_step(kind, at_once, gathers, target, make_drafter):
    drafter = make_drafter(target, **kind, draft_pool_size=None)
    config = drafter.config
    hidden, tokens = torch.randn(2, 3, config.block_size, config.hidden_size), torch.randint(4, 64, (2, 3, 6))
    chosen = torch.tensor([[True, False, True], [False, False, True]])
    view, counts, limit = TargetModel(target, config), [], at_once * 64 * (6 - config.label_offset)
    watch = target.lm_head.register_forward_hook(lambda _, __, logits: counts.append(logits.numel()))
    own = write_own_prefixes(drafter, view, hidden, tokens, chosen, limit, gathers)
    watch.remove()
    assert max(counts) == limit
    assert torch.equal(own[~chosen], tokens[~chosen])
    assert torch.equal(own[..., 0], tokens[..., 0])
    offset = config.label_offset
    for z, block in zip(hidden[chosen], own[chosen], strict=True):
        state = torch.zeros(1, config.gru_hidden_dim)
        for k in range(config.block_size - 1):
            state = drafter.prefix_gru.step(view.embed(block[k : k + 1]), state)
            logits = view.logits(z[k + offset])
            if k >= config.pure_draft_prefix_len:
                logits = logits + drafter.embed_proj(torch.cat((z[k + offset], state[0])))
            assert block[k + 1] == logits.argmax()


def test_training_with_own_prefixes_learns_and_differs(target, make_drafter, make_trainer, greedy_rows):
    losses = []
    for share in (0.0, 1.0):
        trainer = make_trainer(
            make_drafter(target), greedy_rows, max_steps=20, own_prefix_share=share, lambda_base_start=0.0
        )
        trainer.train()
        losses.append([entry["corrected_loss"] for entry in trainer.state.log_history if "corrected_loss" in entry])
        assert losses[-1][-1] < losses[-1][0]
    assert losses[0] != losses[1]

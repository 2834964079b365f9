"""Distillation against distributions computed position by position, and in a training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_losses import ANCHORS, KINDS, TOLERANCE

from hf_domino.target.view import TargetModel
from hf_domino.training.objective.anchors import block_labels
from hf_domino.training.objective.distillation import check_final, divergences, gather_final, teach
from hf_domino.training.objective.forward import read_target
from hf_domino.training.objective.losses import LossOptions, ScoredBlocks, corrected_positions, draft_logits
from hf_domino.training.objective.scoring import draft_losses


def scored_blocks(drafter, view, loss_decay=4.0) -> tuple[ScoredBlocks, torch.Tensor]:
    """Random hidden states at real positions, and the target's logits before each label, `[N, K, V]`."""
    input_ids, config = torch.randint(4, 64, (2, 18), generator=torch.Generator().manual_seed(0)), drafter.config
    labels, weights = block_labels(input_ids, torch.ones_like(input_ids), ANCHORS, config, loss_decay)
    final = gather_final(
        read_target(view, input_ids, final=True).final, ANCHORS, config.block_size, config.label_offset
    )
    before = (ANCHORS[..., None] + torch.arange(config.block_size) - config.label_offset).clamp(0, 17)
    laws = view.model(input_ids).logits[torch.arange(2)[:, None, None], before]
    states = torch.randn(*labels.shape, config.gru_hidden_dim)
    fields = torch.randn(*labels.shape, config.hidden_size), states, labels, weights, final
    return ScoredBlocks(*(field.flatten(0, 1) for field in fields)), laws.flatten(0, 1)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]])
@pytest.mark.parametrize("divergence", ["kl", "tv"])
def test_losses_are_the_divergence_from_the_targets_distribution(kind, divergence, target, make_drafter):
    drafter = make_drafter(target, **kind)
    view = TargetModel(target, drafter.config)
    blocks, laws = scored_blocks(drafter, view)
    options = LossOptions(0.25, divergence)
    found = draft_losses(drafter, view, blocks, 0.3, 3 * 64, options)
    is_corrected = corrected_positions(drafter.config, laws.device)
    both = draft_logits(drafter, view, blocks.hidden, blocks.states, is_corrected)
    for logits, loss in zip(both, (found.base, found.corrected), strict=True):
        expected = 0.0
        for block, k in blocks.has_loss.nonzero().tolist():
            drafted, law = logits[block, k], laws[block, k]
            taught, learned = law.softmax(-1), drafted.softmax(-1)
            if divergence == "tv":
                distance = 1 - torch.minimum(taught, learned).sum()  # what is rejected
            else:
                distance = (taught * (taught.log() - learned.log())).sum()
            entropy = -drafted.log_softmax(-1)[blocks.labels[block, k]]
            expected += blocks.weights[block, k] * (0.25 * distance + 0.75 * entropy)
        torch.testing.assert_close(loss, expected, **TOLERANCE)


def test_the_divergence_and_its_gradient_are_torchs_own():
    logits, target_logits, weights = torch.randn(5, 64, requires_grad=True), torch.randn(5, 64), torch.rand(5)
    expected = F.kl_div(logits.log_softmax(-1), target_logits.log_softmax(-1), reduction="none", log_target=True).sum(
        -1
    )
    found = divergences(logits, *teach(target_logits))
    torch.testing.assert_close(found, expected, **TOLERANCE)
    gradients = [torch.autograd.grad((loss * weights).sum(), logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, **TOLERANCE)


def test_a_last_state_that_lm_head_does_not_read_is_refused(target, make_drafter):
    view = TargetModel(target, make_drafter(target).config)
    read = read_target(view, torch.arange(4, 20)[None], final=True)
    check_final(view, read.final, read.logits)
    with pytest.raises(ValueError, match="of qwen3 must be the logits"):
        check_final(view, read.final * 1.5, read.logits)

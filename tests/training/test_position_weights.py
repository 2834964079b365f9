"""D-PACE's weights against the derivative they are, and in losses cut into chunks."""

from __future__ import annotations

import pytest
import torch
from test_losses import KINDS, TOLERANCE, scored_blocks

from hf_domino.training.objective import losses as objective
from hf_domino.training.objective.losses import LossOptions, corrected_positions, draft_logits, dynamic_weights
from hf_domino.training.objective.scoring import draft_losses


def test_weights_are_the_derivative_of_the_expected_accepted_length(monkeypatch):
    monkeypatch.setattr(objective, "ALPHA", 1e-12)
    smooth = torch.rand(3, 6, dtype=torch.float64).requires_grad_()
    smooth.log().cumsum(-1).exp().sum().backward()  # without smoothing: derivative by log q
    expected = smooth.grad * smooth.detach()
    counts = torch.ones(3, 6, dtype=torch.bool)
    torch.testing.assert_close(dynamic_weights(smooth.detach(), counts), expected)


def test_labels_that_do_not_count_are_passed_by():
    confidence, counts = torch.rand(6), torch.tensor([True, False, True, True, False, True])
    found = dynamic_weights(confidence, counts)
    torch.testing.assert_close(found[counts], dynamic_weights(confidence[counts], torch.ones(4).bool()))
    assert found[~counts].tolist() == [0, 0]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]])
def test_losses_are_weighted_block_by_block(kind, target, make_drafter):
    drafter = make_drafter(target, **kind).train()
    input_ids = torch.randint(4, 64, (2, 18), generator=torch.Generator().manual_seed(0))
    loss_mask = torch.ones_like(input_ids)
    loss_mask[1, 15] = 0
    view, scored = scored_blocks(drafter, target, input_ids, loss_mask)
    is_corrected = corrected_positions(drafter.config, input_ids.device)
    both = draft_logits(drafter, view, scored.hidden, scored.states, is_corrected)
    for logits, name in zip(both, ("base", "corrected"), strict=True):
        entropy = torch.nn.functional.cross_entropy(logits.transpose(1, 2), scored.labels, reduction="none")
        weights = dynamic_weights(entropy.neg().exp(), scored.weights > 0) * scored.weights
        for size, gathers in ((2**26, True), (7 * 64, True), (7 * 64, False)):
            losses = draft_losses(drafter, view, scored, 0.3, size, LossOptions(dpace=True), gathers)
            torch.testing.assert_close(getattr(losses, name), (entropy * weights).sum().detach(), **TOLERANCE)

"""The loss against a computation block by block that shares no code with the package."""

from __future__ import annotations

import math

import pytest
import torch
from naive import naive_positions

from hf_domino.target.view import TargetModel
from hf_domino.training.objective.anchors import block_labels
from hf_domino.training.objective.forward import draft_blocks, read_target
from hf_domino.training.objective.losses import ScoredBlocks, lambda_base_at, score_chunk
from hf_domino.training.objective.scoring import draft_losses

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}  # fp32 sums in another order
BF16_TOL = {"rtol": 2e-2, "atol": 2e-2}  # gradients of chunks are rounded before they are added
KINDS = [
    {"shift_label": True, "pure_draft_prefix_len": 1},
    {"shift_label": True, "pure_draft_prefix_len": 0},
    {"shift_label": False, "pure_draft_prefix_len": 0},
    {"shift_label": False, "pure_draft_prefix_len": 2},
    {"projector_type": "dflash"},
    {"projector_type": "medusa"},
    {"projector_type": "eagle3"},
    {"projector_type": "eagle3", "own_lm_head": True, "norm_output": True},
]
ANCHORS = torch.tensor([[3, 9, 14], [5, 12, -1]])


def scored_blocks(drafter, target, input_ids, loss_mask) -> tuple[TargetModel, ScoredBlocks]:
    view = TargetModel(target, drafter.config)
    context = drafter.fuse_context(read_target(view, input_ids).captured)
    drafted = draft_blocks(drafter, view, input_ids, context, ANCHORS)
    labels, weights = block_labels(input_ids, loss_mask, ANCHORS, drafter.config, loss_decay=4.0)
    fields = (*drafted, labels, weights)
    return view, ScoredBlocks(*(None if field is None else field.flatten(0, 1) for field in fields))


def package_losses(drafter, target, input_ids, loss_mask, lambda_base=0.3, max_logits_per_chunk=2**26):
    view, scored = scored_blocks(drafter, target, input_ids, loss_mask)
    return draft_losses(drafter, view, scored, lambda_base, max_logits_per_chunk)


def naive_losses(drafter, target, input_ids, loss_mask):
    """Cross-entropies of both terms, position by position."""
    batch = {"input_ids": input_ids, "loss_mask": loss_mask, "anchors": ANCHORS}
    base_sum = corrected_sum = 0.0
    for _, k, base, corrected, _, label in naive_positions(drafter, target, batch, target.lm_head.weight):
        weight = math.exp(-(k - drafter.config.label_offset) / 4.0)
        base_sum = base_sum - weight * base.log_softmax(-1)[label]
        corrected_sum = corrected_sum - weight * corrected.log_softmax(-1)[label]
    return base_sum, corrected_sum


@pytest.fixture
def batch():
    input_ids = torch.randint(4, 64, (2, 18), generator=torch.Generator().manual_seed(0))
    loss_mask = torch.ones_like(input_ids)
    loss_mask[:, :3] = 0
    loss_mask[0, 16] = 0
    return input_ids, loss_mask


@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_the_naive_ones(kind, target, make_drafter, batch):
    drafter = make_drafter(target, **kind)
    losses = package_losses(drafter, target, *batch)
    base, corrected = naive_losses(drafter, target, *batch)
    torch.testing.assert_close(losses.base, base, **TOLERANCE)
    torch.testing.assert_close(losses.corrected, corrected, **TOLERANCE)


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[3:]])
@pytest.mark.parametrize("autocast", [False, True])
def test_chunks_and_masks_change_neither_loss_nor_gradient(kind, autocast, target, make_drafter, batch):
    target.requires_grad_(False)
    results = []
    for size, gathers in ((None, True), (2**26, True), (3 * 64, True), (3 * 64, False)):
        drafter = make_drafter(target, **kind).train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            view, scored = scored_blocks(drafter, target, *batch)
            losses = (
                score_chunk(drafter, view, scored, 0.3)
                if size is None
                else draft_losses(drafter, view, scored, 0.3, size, gathers=gathers)
            )
        (losses.loss / 7).backward()
        results.append((losses, [parameter.grad for parameter in drafter.parameters()]))
    (reference, gradients), *others = results
    for losses, found in others:
        torch.testing.assert_close(vars(losses), vars(reference), **TOLERANCE)
        torch.testing.assert_close(found, gradients, **(BF16_TOL if autocast else TOLERANCE))


def test_a_head_is_trained_alone_as_with_the_rest(target, make_drafter, batch):
    gradients = []
    for frozen in (False, True):
        drafter = make_drafter(target)
        drafter.requires_grad_(not frozen)
        for module in (drafter.prefix_gru, drafter.embed_proj):
            module.requires_grad_(True)
        package_losses(drafter, target, *batch, max_logits_per_chunk=3 * 64).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in drafter.named_parameters()})
    whole, alone = gradients
    assert {name for name, gradient in alone.items() if gradient is not None} == {
        name for name in whole if name.startswith(("prefix_gru", "embed_proj"))
    }
    assert all(torch.equal(gradient, whole[name]) for name, gradient in alone.items() if gradient is not None)


@pytest.mark.parametrize("lambda_base", [0.0, 1.0])
def test_every_parameter_has_a_gradient(lambda_base, target, make_drafter, batch):
    drafter = make_drafter(target)
    package_losses(drafter, target, *batch, lambda_base).loss.backward()
    assert [name for name, parameter in drafter.named_parameters() if parameter.grad is None] == []


def test_gradients_flow_when_nothing_is_supervised(target, make_drafter, batch):
    drafter = make_drafter(target)
    input_ids, loss_mask = batch
    losses = package_losses(drafter, target, input_ids, torch.zeros_like(loss_mask))
    assert losses.loss.item() == 0
    losses.loss.backward()


def test_lambda_base_falls_linearly():
    assert [lambda_base_at(step, 10, 1.0) for step in (0, 5, 10, 12)] == [1.0, 0.5, 0.0, 0.0]
    assert lambda_base_at(0, 10, 0.0) == 0.0
    assert [lambda_base_at(step, 10, 1.0, start=0.5) for step in (0, 5, 10)] == [0.5, 0.25, 0.0]

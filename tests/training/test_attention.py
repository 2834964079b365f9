"""Training with tiles and with checkpointed layers: the losses and gradients of the dense mask, in less memory."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from hf_domino.kinds import side_by_side
from hf_domino.training.objective.anchors import collate_rows, sample_anchors

KINDS = [
    {},
    {"shift_label": False},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    {"projector_type": "dflash"},
]
RELATIVE_TOL = 1e-6  # of a tensor's norm: fp32 sums in another order


def losses_and_gradients(drafter, trainer, rows):
    batch = collate_rows(rows)
    batch["anchors"] = sample_anchors(batch, 12, 4)
    drafter.train().zero_grad()
    losses = trainer.objective.score(batch, lambda_base=0.4)
    losses.loss.backward()
    return [losses.base, losses.corrected, *(parameter.grad.clone() for parameter in drafter.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_train_as_the_dense_mask_does(kind, target, make_drafter, make_trainer, greedy_rows, monkeypatch):
    drafter, found = make_drafter(target, **kind), []
    trainer = make_trainer(drafter, greedy_rows)
    for limit in (0, 2**30):
        monkeypatch.setattr(side_by_side, "MAX_DENSE_SCORES", limit)
        found.append(losses_and_gradients(drafter, trainer, greedy_rows))
    for tiled, dense in zip(*found, strict=True):
        assert (tiled - dense).norm() <= RELATIVE_TOL * dense.norm()


def test_gradient_checkpointing(target, make_drafter, make_trainer, greedy_rows, monkeypatch):
    monkeypatch.setattr(side_by_side, "MAX_DENSE_SCORES", 0)
    results, elements = [], []
    for checkpointing in (False, True):
        drafter, kept = make_drafter(target, num_hidden_layers=4), {}
        trainer = make_trainer(drafter, greedy_rows, gradient_checkpointing=checkpointing, max_steps=1)
        trainer.train()

        def keep(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            results.append(losses_and_gradients(drafter, trainer, greedy_rows))
        elements.append(sum(kept.values()))
    torch.testing.assert_close(*results, atol=0, rtol=0)
    assert elements[1] < 0.5 * elements[0]

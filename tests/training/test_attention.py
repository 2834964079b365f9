"""Training with checkpointed layers: the same losses and gradients, in less memory."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks

from hf_domino.training.objective.anchors import collate_rows, sample_anchors


def losses_and_gradients(drafter, trainer, rows):
    batch = collate_rows(rows)
    batch["anchors"] = sample_anchors(batch, 12, 4)
    drafter.train().zero_grad()
    losses = trainer.drafter_training(**batch, lambda_base=0.4)
    losses.loss.backward()
    return [losses.base, losses.corrected, *(parameter.grad.clone() for parameter in drafter.parameters())]


def test_gradient_checkpointing(target, make_drafter, make_trainer, greedy_rows):
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

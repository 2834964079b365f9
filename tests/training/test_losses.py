"""The losses against a computation position by position that shares no code with the package."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from naive import naive_positions

from hf_domino.training.objective.losses import lambda_base_at

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # fp32 sums in another order
KINDS = [
    {"shift_label": True, "pure_draft_prefix_len": 1},
    {"shift_label": False, "pure_draft_prefix_len": 2},
    {"projector_type": "dflash"},
    {"projector_type": "dspark", "markov_head_type": "vanilla"},
    {"projector_type": "dspark", "markov_head_type": "gated", "shift_label": False},
    {"projector_type": "dspark", "markov_head_type": "rnn"},
    {"projector_type": "dflash2", "shift_label": False},
    {"conv_kernel_size": 3, "conv_group_size": 8, "layer_fusion": True},
    {"projector_type": "dfly", "shift_label": False},
    {"projector_type": "xpress", "xpress_rank": 8},
    {"projector_type": "xpress", "xpress_rank": 8, "shift_label": False},
    {"projector_type": "eagle3"},
    {"projector_type": "eagle3", "own_lm_head": True, "norm_output": True},
]
SOME = [*range(4, 40, 2), *range(41, 64, 3)]
OPTIONS = {
    "published": {},
    "dpace": {"position_weights": "dpace"},
    "kl": {"distillation_weight": 0.25},
}


def make_batch() -> dict[str, torch.Tensor]:
    """Two rows with anchors; of a draft vocabulary of `SOME`, half of the labels are not drafted."""
    ids = torch.randint(4, 64, (2, 18), generator=torch.Generator().manual_seed(0))
    loss_mask = torch.ones_like(ids)
    loss_mask[:, :3], loss_mask[0, 16] = 0, 0
    batch = {"input_ids": ids, "loss_mask": loss_mask, "attention_mask": torch.ones_like(ids)}
    return batch | {"anchors": torch.tensor([[3, 9, 14], [5, 12, -1]])}


def naive_loss(drafter, target, batch, lambda_base, options, ids):
    """The loss over the tokens that are drafted, by position; also what it is to be divided by."""
    everything = list(naive_positions(drafter, target, batch, target.lm_head.weight[ids]))
    found = [entry for entry in everything if entry[-1] in ids]
    total = [0.0, 0.0]
    decay = math.inf if "position_weights" in options else 4.0
    weights = [math.exp(-(k - drafter.config.label_offset) / decay) for _, k, *_ in found]
    for term in (0, 1):
        entropies = [-entry[2 + term].log_softmax(-1)[ids.index(entry[-1])] for entry in found]
        scale = list(weights)
        if "position_weights" in options:
            scale = []
            known = {(block, k): float((-e.detach()).exp()) for e, (block, k, *_) in zip(entropies, found, strict=True)}
            for block in dict.fromkeys(entry[0] for entry in found):
                # Of a label outside the drafter has no probability at all, and what comes behind it is not accepted.
                steps = [entry[1] for entry in everything if entry[0] == block]
                smooth = [0.5 * known.get((block, k), 0.0) + 0.5 for k in steps]
                accepted = [math.prod(smooth[: index + 1]) for index in range(len(steps))]
                scale += [sum(accepted[index:]) for index, k in enumerate(steps) if (block, k) in known]
        for entropy, entry, weight in zip(entropies, found, scale, strict=True):
            loss = entropy
            if "distillation_weight" in options:
                taught, drafted = (x.log_softmax(-1) for x in (entry[4], entry[2 + term]))
                learned = F.kl_div(drafted, taught, log_target=True, reduction="sum")
                loss = 0.75 * entropy + 0.25 * learned
            total[term] = total[term] + weight * loss
    return (1 - lambda_base) * total[1] + lambda_base * total[0], sum(weights)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("index", range(len(KINDS)))
def test_losses_and_gradients_equal_the_naive_ones(index, name, target, make_drafter, make_trainer, greedy_rows):
    drafter, batch, options = make_drafter(target, **KINDS[index]), make_batch(), OPTIONS[name]
    ids = (SOME, list(range(64)))[(index + [*OPTIONS].index(name)) % 2]
    if ids is SOME:
        drafter = drafter.restricted(ids)
    expected, weight = naive_loss(drafter, target, batch, 0.3, options, ids)
    wanted = torch.autograd.grad(0.5 * expected, list(drafter.parameters()), allow_unused=True)
    objective = make_trainer(drafter, greedy_rows, **options, loss_decay=4.0).objective
    for max_logits, gathers in ((2**26, True), (3 * len(ids), True), (3 * len(ids), False)):  # one chunk, and many
        objective.max_logits, objective.gathers = max_logits, gathers
        objective.label(batch)
        losses = objective.score(batch, 0.3)
        torch.testing.assert_close(losses.loss, expected, **TOLERANCE)
        torch.testing.assert_close(batch["loss_weight"].item(), weight, **TOLERANCE)
        found = torch.autograd.grad(0.5 * losses.loss, list(drafter.parameters()), allow_unused=True)
        torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("supervised", [0, 1])
def test_every_parameter_has_a_gradient(supervised, target, make_drafter, make_trainer, greedy_rows):
    drafter, batch = make_drafter(target), make_batch()
    batch["loss_mask"] *= supervised
    loss = make_trainer(drafter, greedy_rows).objective.score(batch, float(supervised)).loss
    loss.backward()
    assert bool(loss) == bool(supervised)
    assert [name for name, parameter in drafter.named_parameters() if parameter.grad is None] == []


def test_lambda_base_falls_linearly():
    assert [lambda_base_at(step, 10, 1.0, start=0.5) for step in (0, 5, 10, 12)] == [0.5, 0.25, 0.0, 0.0]
    assert lambda_base_at(0, 10, 0.0) == 0.0

"""The losses: the reference by hand, the chunked loss by the reference, and both from logits of single positions."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from naive import naive_positions

from hf_domino.targets.view import TargetModel
from hf_domino.training.losses import chunked, eager
from hf_domino.training.losses.eager import lambda_base_at
from hf_domino.training.objective.forward import draft_blocks, lazy_logits, read_target

TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}  # fp32 sums in another order
EXACT = {"rtol": 1e-10, "atol": 1e-12}  # the same in fp64
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


def test_the_reference_by_hand():
    """One block of three positions and two tokens, of which the last label cannot be drafted."""
    base = torch.tensor([[[0.0, 1.0], [2.0, 0.0], [0.5, 0.5]]], dtype=torch.float64)
    corrected = torch.tensor([[[3.0, 0.0], [0.0, 0.0], [1.0, 4.0]]], dtype=torch.float64)
    target = torch.tensor([[[1.0, 1.0], [0.0, 2.0], [0.0, 0.0]]], dtype=torch.float64)
    labels = torch.tensor([[1, 0, -1]])
    weights = torch.tensor([[1.0, 0.5, 0.25]], dtype=torch.float64)

    def entropy(logits, label):
        return math.log(sum(map(math.exp, logits))) - logits[label]

    def divergence(logits, expected):
        shares = [math.exp(value) / sum(map(math.exp, expected)) for value in expected]
        return sum(share * (math.log(share) + entropy(logits, token)) for token, share in enumerate(shares))

    def by_hand(logits, distills=0.0, dpace=False):
        losses = [entropy(logits[k], label) for k, label in enumerate((1, 0))]
        scale = [1.0, 0.5]
        if dpace:  # what is not drafted has no probability, so nothing behind it is accepted
            first, second, third = (0.5 + 0.5 * share for share in (math.exp(-losses[0]), math.exp(-losses[1]), 0.0))
            scale = [
                1.0 * (first + first * second + first * second * third),
                0.5 * (first * second + first * second * third),
            ]
        learned = [divergence(logits[k], target[0, k].tolist()) for k in range(2)]
        mixed = [(1 - distills) * one + distills * other for one, other in zip(losses, learned, strict=True)]
        return sum(one * weight for one, weight in zip(mixed, scale, strict=True))

    for teacher, share, dpace in ((None, 0.0, False), (None, 0.0, True), (target, 0.25, False), (target, 1.0, True)):
        found = eager.domino_loss(base, corrected, labels, weights, 0.3, teacher, share, dpace)
        of_base, of_corrected = (by_hand(logits[0].tolist(), share, dpace) for logits in (base, corrected))
        assert found.base.item() == pytest.approx(of_base)
        assert found.corrected.item() == pytest.approx(of_corrected)
        assert found.loss.item() == pytest.approx(0.7 * of_corrected + 0.3 * of_base)
    assert found.is_base_correct.tolist() == [[True, True, False]]
    assert found.is_correct.tolist() == [[False, True, False]]
    alone = eager.domino_loss(base, base, labels, weights, 0.3)
    assert alone.loss == alone.base == alone.corrected


def test_both_have_the_same_signature():
    reference, found = (inspect.signature(module.domino_loss).parameters for module in (eager, chunked))
    assert [*found][: len(reference)] == [*reference]
    assert all(found[name].default == reference[name].default for name in reference)


@pytest.mark.parametrize("limit", ["several tokens", "one token", "all masked"])
@pytest.mark.parametrize("index", range(len(KINDS)))
def test_the_chunked_loss_is_the_reference(index, limit, target, make_drafter, monkeypatch):
    """In fp64, with every option, whatever the chunks are."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # logits are made fp32 otherwise
    drafter = make_drafter(target, **KINDS[index])
    if index % 2:
        drafter = drafter.restricted(SOME)
    drafter, batch = drafter.double(), make_batch()
    view = TargetModel(target.double(), drafter.config.layer_ids(target.config))
    captured, final = read_target(view, batch, final=True)
    hidden, states = draft_blocks(drafter, view, batch, drafter.fuse_context(captured))
    leaves = [values.flatten(0, 1).detach().requires_grad_() for values in (hidden, states) if values is not None]
    final = final[:, :3].flatten(0, 1)[:, None].expand(-1, drafter.config.block_size, -1)  # of whichever tokens
    logits = lazy_logits(drafter, view, leaves[0], leaves[1] if len(leaves) > 1 else None, final)
    labels = torch.randint(-1, drafter.config.draft_width, leaves[0].shape[:2])
    weights = torch.rand(labels.shape, dtype=torch.float64) * (torch.rand(labels.shape) < 0.7)
    if limit != "several tokens":
        weights = torch.zeros_like(weights)
    if limit == "one token":
        weights[2, -1], labels[2, -1] = 0.5, 3
    wanted = [*leaves, *drafter.head_parameters()]
    for share, dpace, lambda_base in ((0.0, False, 0.3), (0.25, True, 1.0), (1.0, False, 0.0)):
        base, corrected, teacher = (each.whole() for each in logits)
        if logits[1] is logits[0]:
            corrected = base
        options = (labels, weights, lambda_base)
        reference = eager.domino_loss(base, corrected, *options, teacher.detach(), share, dpace)
        gradients = torch.autograd.grad(2 * reference.loss, wanted, allow_unused=True, materialize_grads=True)
        assert any(gradient.any() for gradient in gradients) == (limit != "all masked")
        for blocks, gathers in ((1, True), (4, False), (6, True)):
            chunks = {"blocks_at_once": blocks, "gathers": gathers}
            found = chunked.domino_loss(*logits[:2], *options, logits[2], share, dpace, **chunks)
            torch.testing.assert_close(found[:4], reference[:4], **EXACT)
            own = torch.autograd.grad(2 * found.loss, wanted, allow_unused=True, materialize_grads=True)
            torch.testing.assert_close(own, gradients, **EXACT)
            with torch.no_grad():
                found = chunked.domino_loss(*logits[:2], *options, logits[2], share, dpace, **chunks)
            torch.testing.assert_close([*found], [each.detach() for each in reference], **EXACT)


def test_a_chunked_loss_is_differentiated_once():
    weight = torch.ones(2, 3, 4, requires_grad=True)
    lazy = chunked.LazyLogits(lambda values: 2 * values, (weight,))
    loss = chunked.domino_loss(lazy, lazy, torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 3), 0.0).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated only once"):
        loss.backward()


def test_the_compiled_loss_is_the_reference():
    leaf = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    labels, weights = torch.tensor([[0, 1], [2, -1], [3, 3]]), torch.rand(3, 2, dtype=torch.float64)

    def loss(values):
        base = chunked.LazyLogits(torch.sin, (values,))
        corrected = chunked.LazyLogits(torch.add, (base, values))
        return chunked.domino_loss(base, corrected, labels, weights, 0.3, blocks_at_once=2, gathers=True).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True)(leaf)
    (found,) = torch.autograd.grad(compiled, leaf)
    expected = eager.domino_loss(leaf.sin(), leaf.sin() + leaf, labels, weights, 0.3).loss
    torch.testing.assert_close(compiled, expected, **EXACT)
    torch.testing.assert_close(found, torch.autograd.grad(expected, leaf)[0], **EXACT)


def naive_losses(drafter, target, batch, lambda_base, options, ids):
    """The reference over logits that are made one position at a time, and the sum of the weights to divide by."""
    config = drafter.config
    shape = (batch["anchors"].numel(), config.block_size)
    logits = torch.zeros(3, *shape, len(ids))  # base, corrected, the target's
    labels, weights = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    decay = math.inf if "position_weights" in options else 4.0
    blocks = [(row, anchor) for row, anchors in enumerate(batch["anchors"].tolist()) for anchor in anchors]
    places, values = [], []
    for block, k, *made, label in naive_positions(drafter, target, batch, target.lm_head.weight[ids]):
        place = (blocks.index(block), k)
        places.append(place)
        values.append(torch.stack(made))
        labels[place] = ids.index(label) if label in ids else -1
        weights[place] = math.exp(-(k - config.label_offset) / decay)
    rows, columns = torch.tensor(places).T
    logits = logits.index_put((torch.arange(3)[:, None], rows, columns), torch.stack(values, dim=1))
    base, corrected, teacher = logits
    if not drafter.has_correction_head:
        corrected = base
    share = options.get("distillation_weight", 0.0)
    dpace = "position_weights" in options
    scored = (labels, weights, lambda_base, teacher.detach() if share else None)
    return eager.domino_loss(base, corrected, *scored, share, dpace).loss, (weights * (labels >= 0)).sum().item()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("index", range(len(KINDS)))
def test_losses_and_gradients_equal_the_naive_ones(index, name, target, make_drafter, make_trainer, greedy_rows):
    drafter, batch, options = make_drafter(target, **KINDS[index]), make_batch(), OPTIONS[name]
    ids = (SOME, list(range(64)))[(index + [*OPTIONS].index(name)) % 2]
    if ids is SOME:
        drafter = drafter.restricted(ids)
    expected, weight = naive_losses(drafter, target, batch, 0.3, options, ids)
    wanted = torch.autograd.grad(0.5 * expected, list(drafter.parameters()), allow_unused=True)
    training = make_trainer(drafter, greedy_rows, **options, loss_decay=4.0).drafter_training
    for max_logits, gathers in ((2**26, True), (3 * len(ids), False)):  # one chunk, and many
        training.max_logits, training.gathers = max_logits, gathers
        training.label(batch)
        losses = training(**batch, lambda_base=0.3)
        torch.testing.assert_close(losses.loss, expected, **TOLERANCE)
        torch.testing.assert_close(batch["loss_weight"].item(), weight, **TOLERANCE)
        found = torch.autograd.grad(0.5 * losses.loss, list(drafter.parameters()), allow_unused=True)
        torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("supervised", [0, 1])
def test_every_parameter_has_a_gradient(supervised, target, make_drafter, make_trainer, greedy_rows):
    drafter, batch = make_drafter(target), make_batch()
    batch["loss_mask"] *= supervised
    loss = make_trainer(drafter, greedy_rows).drafter_training(**batch, lambda_base=float(supervised)).loss
    loss.backward()
    assert bool(loss) == bool(supervised)
    assert [name for name, parameter in drafter.named_parameters() if parameter.grad is None] == []


def test_lambda_base_falls_linearly():
    assert [lambda_base_at(step, 10, 1.0, start=0.5) for step in (0, 5, 10, 12)] == [0.5, 0.25, 0.0, 0.0]
    assert lambda_base_at(0, 10, 0.0) == 0.0

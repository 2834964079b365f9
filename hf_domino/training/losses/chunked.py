"""The loss of `eager.py` without all logits in memory: its logits are computed for a few blocks at a time.

The gradients of these blocks are computed while their logits are in memory. The backward pass does not compute the
logits again; it only scales these gradients (as Liger's fused losses do, arXiv 2410.10989). lm_head is called and
differentiated as a module, so it can be quantised or offloaded.

Shapes: N blocks, K block size, M positions of some blocks, D tokens that can be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_domino.training.losses import eager
from hf_domino.training.losses.eager import DraftLosses, dynamic_weights


@dataclass(frozen=True, eq=False)
class LazyLogits:
    """Logits `[N, K, D]` that are computed for a few positions at a time.

    Args:
        compute (`Callable`): Computes the logits `[M, D]` of some positions from the values of `inputs` there.
        inputs (`tuple`): Tensors `[N, K, ...]`, and other lazy logits.
        parameters (`Sequence[nn.Parameter]`, *optional*, defaults to `()`): The weights in `compute` to differentiate.
    """

    compute: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor | LazyLogits, ...]
    parameters: Sequence[nn.Parameter] = ()

    def whole(self, blocks: slice = slice(None)) -> torch.Tensor:
        """Compute all logits of some blocks at once, `[N, K, D]`."""
        values = (each.whole(blocks) if isinstance(each, LazyLogits) else each[blocks] for each in self.inputs)
        return self.compute(*values)

    def at(self, known: dict[int, torch.Tensor]) -> torch.Tensor:
        """Compute the logits from the values that `known` holds by the `id` of each input, and add them to it."""
        if id(self) not in known:
            values = (each.at(known) if isinstance(each, LazyLogits) else known[id(each)] for each in self.inputs)
            known[id(self)] = self.compute(*values)
        return known[id(self)]

    def sources(self) -> Iterator[LazyLogits]:
        """Yield these logits and all lazy logits that they are computed from."""
        yield self
        for each in self.inputs:
            if isinstance(each, LazyLogits):
                yield from each.sources()


def domino_loss(
    base: LazyLogits,
    corrected: LazyLogits,
    labels: torch.Tensor,
    weights: torch.Tensor,
    lambda_base: float,
    target_logits: LazyLogits | None = None,
    distillation_weight: float = 0.0,
    dpace: bool = False,
    *,
    blocks_at_once: int = 1,
    gathers: bool = False,
) -> DraftLosses:
    """Compute [`~training.losses.eager.domino_loss`] of logits that are computed for a few blocks at a time.

    If gradients are enabled, they are computed here, and `loss.backward()`, which can run only once, scales them.

    Args:
        base, corrected, labels, weights, lambda_base, target_logits, distillation_weight, dpace: As for the reference.
        blocks_at_once (`int`, *optional*, defaults to 1): Number of blocks whose logits are in memory at once.
        gathers (`bool`, *optional*, defaults to `False`): Whether to compute logits only at positions that carry a
            loss. That saves the products of the others, but waits for the device, and shapes depend on the text.
    """
    chunks = [slice(first, first + blocks_at_once) for first in range(0, len(labels), blocks_at_once)]
    options = (distillation_weight, dpace)
    parts: list[DraftLosses] = []
    if torch.compiler.is_compiling():  # the compiler makes its own backward pass
        for blocks in chunks:
            of_base = of_corrected = base.whole(blocks)
            if corrected is not base:
                of_corrected = corrected.whole(blocks)
            teacher = None if target_logits is None else target_logits.whole(blocks)
            scored = (of_base, of_corrected, labels[blocks], weights[blocks], lambda_base, teacher)
            parts.append(eager.domino_loss(*scored, *options))
        return _sum_up(parts)

    learns = torch.is_grad_enabled()
    lazy = (base, corrected) if target_logits is None else (base, corrected, target_logits)
    sources = {id(one): one for logits in lazy for one in logits.sources()}.values()
    inputs = {id(one): one for each in sources for one in each.inputs if isinstance(one, torch.Tensor)}
    trained = [key for key, values in inputs.items() if learns and values.requires_grad]
    parameters = {id(one): one for each in sources for one in each.parameters if learns and one.requires_grad}
    of_inputs = []
    of_parameters: Sequence[torch.Tensor] = ()
    for blocks in chunks:
        leaves = {key: values[blocks].detach().requires_grad_(key in trained) for key, values in inputs.items()}
        positions = _Positions(labels[blocks], weights[blocks], gathers)
        known = {key: positions.take(values) for key, values in leaves.items()}
        part, logits, gradients = _score(base, corrected, target_logits, known, positions, lambda_base, *options)
        parts.append(part)
        if not learns:
            continue
        wanted = (*(leaves[key] for key in trained), *parameters.values())
        found = torch.autograd.grad(logits, wanted, gradients, allow_unused=True, materialize_grads=True)
        of_inputs.append(found[: len(trained)])
        own = found[len(trained) :]
        if of_parameters:
            of_parameters = [total.add_(one) for total, one in zip(of_parameters, own, strict=True)]
        else:
            of_parameters = own
    losses = _sum_up(parts)
    if not learns:
        return losses
    known_gradients = [*map(torch.cat, zip(*of_inputs, strict=True)), *of_parameters]
    differentiated = (*(inputs[key] for key in trained), *parameters.values())
    return losses._replace(loss=_WithGradients.apply(losses.loss, known_gradients, *differentiated))


class _Positions:
    """The positions of some blocks at which logits are computed: those that carry a loss, or all of them.

    Args:
        labels (`torch.Tensor`): `[N, K]` int64, -1 for a label that cannot be drafted.
        weights (`torch.Tensor`): `[N, K]`, 0 where a label does not count.
        gathers (`bool`): Whether to leave out the positions without a loss.
    """

    def __init__(self, labels: torch.Tensor, weights: torch.Tensor, gathers: bool):
        self.counts = weights > 0
        self.has_loss = self.counts & (labels >= 0)
        self.weights = torch.where(self.has_loss, weights, 0.0)
        self._places = self.has_loss.flatten().nonzero()[:, 0] if gathers else None
        self.labels = self.take(labels).clamp(min=0)  # [M]

    def take(self, values: torch.Tensor) -> torch.Tensor:
        """Select the values `[M, ...]` of these positions from `[N, K, ...]`."""
        flat = values.flatten(0, 1)
        if self._places is None:
            return flat
        return flat.index_select(0, self._places)

    def put_back(self, values: torch.Tensor) -> torch.Tensor:
        """Put values `[M]` in their places, `[N, K]`; the others are zero."""
        if self._places is not None:
            values = values.new_zeros(self.has_loss.numel()).index_copy(0, self._places, values)
        return values.view(self.has_loss.shape)

    def hits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return where the first choice of logits `[M, D]` is a label that carries a loss, `[N, K]`."""
        return self.put_back(logits.detach().argmax(dim=-1) == self.labels) & self.has_loss


class _Teacher(NamedTuple):
    """The target's probabilities `[M, D]` and their entropy `[M]` in nats."""

    probs: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> _Teacher:
        """Compute them from logits `[M, D]`."""
        log_probs = F.log_softmax(logits, dim=-1)
        probs = log_probs.exp()
        return cls(probs, log_probs.mul_(probs).sum(dim=-1).neg())


def _score(
    base: LazyLogits,
    corrected: LazyLogits,
    target_logits: LazyLogits | None,
    known: dict[int, torch.Tensor],
    positions: _Positions,
    lambda_base: float,
    *options: Any,
) -> tuple[DraftLosses, list[torch.Tensor], list[torch.Tensor]]:
    """Score some blocks; return the losses, the logits `[M, D]` that were trained, and the loss's gradients there."""
    teacher = None
    if target_logits is not None:
        with torch.no_grad():
            teacher = _Teacher.of(target_logits.at(known))
    of_base = base.at(known)
    if corrected is base:
        loss, gradient = _loss_and_gradient(of_base, positions, 1.0, teacher, *options)
        hits = positions.hits(of_base)
        return DraftLosses(loss, loss, loss, hits, hits), [of_base], [gradient]
    of_corrected = corrected.at(known)
    base_loss, of_base_term = _loss_and_gradient(of_base, positions, lambda_base, teacher, *options)
    corrected_loss, of_corrected_term = _loss_and_gradient(of_corrected, positions, 1 - lambda_base, teacher, *options)
    loss = (1 - lambda_base) * corrected_loss + lambda_base * base_loss
    is_correct = is_base_correct = positions.hits(of_corrected)
    if not torch.is_grad_enabled():
        is_base_correct = positions.hits(of_base)
    losses = DraftLosses(loss, base_loss, corrected_loss, is_correct, is_base_correct)
    if not of_base.requires_grad:  # only the head is trained
        return losses, [of_corrected], [of_corrected_term]
    return losses, [of_base, of_corrected], [of_base_term, of_corrected_term]


def _loss_and_gradient(
    logits: torch.Tensor,
    positions: _Positions,
    share: float,
    teacher: _Teacher | None,
    distillation_weight: float,
    dpace: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute [`~training.losses.eager.draft_loss`] of logits `[M, D]`, and `share` times its gradient `[M, D]`.

    Cross-entropy and divergence have the same gradient: the drafter's probabilities minus the expected ones, which are
    those of the label and the target in the proportion of the distillation. So it takes a third of the passes over the
    logits that automatic differentiation would take.
    """
    log_probs = F.log_softmax(logits.detach(), dim=-1)
    labels = positions.labels[:, None]
    losses = log_probs.gather(1, labels)[:, 0].neg()  # [M]
    weights = positions.weights  # [N, K]
    if dpace:
        confidence = positions.put_back(losses).neg().exp() * positions.has_loss
        weights = weights * dynamic_weights(confidence, positions.counts)
    of_label = 1.0
    if teacher is not None:
        of_label = 1 - distillation_weight
        divergence = (log_probs * teacher.probs).sum(dim=-1).neg() - teacher.entropy
        losses = torch.lerp(losses, divergence, distillation_weight)
    loss = (positions.put_back(losses) * weights).sum()
    if not torch.is_grad_enabled():
        return loss, log_probs
    gradient = log_probs.exp_()  # in place, because these are the largest tensors of a training
    if teacher is not None:
        gradient.sub_(teacher.probs, alpha=distillation_weight)
    if of_label:
        gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, -of_label))
    return loss, gradient.mul_(share * positions.take(weights)[:, None])


def _sum_up(parts: list[DraftLosses]) -> DraftLosses:
    *losses, is_correct, is_base_correct = zip(*parts, strict=True)
    loss, base, corrected = (torch.stack(some).sum() for some in losses)
    return DraftLosses(loss, base, corrected, torch.cat(is_correct), torch.cat(is_base_correct))


class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are already computed."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, gradients: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss; `gradients` are its gradients with respect to `inputs`."""
        ctx.gradients = gradients
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients times `grad_loss`.

        They are scaled in place and handed over, because a copy would take as much memory as the head again.
        """
        gradients = ctx.gradients
        if gradients is None:
            raise RuntimeError("a chunked loss can be differentiated only once, because its gradients are not copied.")
        ctx.gradients = None
        return None, None, *(gradient.mul_(grad_loss) for gradient in gradients)

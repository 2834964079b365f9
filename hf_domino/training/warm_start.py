"""Start a new drafter from its target: it copies the last layers, and its context features are nearly their input.

Such a drafter cannot draft yet, but its matrices already turn hidden states into next tokens, which saves a part of a
short training.

Shapes: T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.backbone import ZeroLinear

HEAD_NORMS = {"self_attn.q_norm": "self_attn.q_proj", "self_attn.k_norm": "self_attn.k_proj"}
*_, DOWN = MLP = "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
# Qwen2 adds a bias to queries, keys and values. A drafter has none, and its norms change queries and keys anyway.
MAY_HAVE_BIAS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Scale of `fc`'s random weights, to which an identity for the last captured layer is added: with them, `fc` can learn
# from all captured layers.
REST = 0.05
REMEDY = "Leave start_from_target out: then a new drafter starts with random weights."
SAME_TOL = 1e-2  # relative difference that 16 bits can make in the output of a layer


@torch.no_grad()
def start_from_target(drafter: DominoDraftModel, target: PreTrainedModel, input_ids: Sequence[int]) -> None:
    """Give a new drafter the weights of its target's last layers.

    `fc` passes on the last captured layer, and the norm behind it is the input norm of the first copied layer. A
    drafter normalises queries and keys, but few targets do. If the target does not, these norms get the size that the
    target's queries and keys have over a text. Biases of queries, keys and values are left out. Narrower MLPs get the
    neurons that add most over that text.

    Args:
        drafter (`DominoDraftModel`): The new drafter, which is changed in place.
        target (`PreTrainedModel`): Its target.
        input_ids (`Sequence[int]`): Tokens of the text, T of them.

    Raises:
        ValueError: If the target has too few layers, or they differ from the drafter's in more than these norms.
    """
    drafter.config.check_supports("start_from_target")
    decoder: Any = target.get_decoder()
    layers = list(getattr(decoder, "layers", ()))[-len(drafter.layers) :]
    if not layers:
        raise invalid_argument("a target to start from", "a decoder with `layers`", type(decoder).__name__, REMEDY)
    if len(layers) < len(drafter.layers):
        raise invalid_argument(
            "num_hidden_layers with start_from_target", f"at most {len(layers)}", len(drafter.layers), REMEDY
        )
    pairs = list(zip(drafter.layers, layers, strict=True))
    ids = torch.tensor([list(input_ids)], device=target.device)
    with _watch_neurons(pairs) as neurons:
        read = decoder(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-len(layers) - 1 : -1]
    for number, (own, layer) in enumerate(pairs):
        modules = dict(layer.named_modules())
        for name, module in own.named_modules():
            is_new = name in HEAD_NORMS or isinstance(module, ZeroLinear)
            if hasattr(module, "weight") and (name in modules or not is_new):
                kept = neurons.get(number, {}).get(name)
                _take(module, modules.get(name), name, kept)
    _take(drafter.norm, getattr(decoder, "norm", None), "norm")
    _take(drafter.hidden_norm, layers[0].input_layernorm, "input_layernorm")
    drafter.fc.weight.mul_(REST)
    width = drafter.config.hidden_size
    layer_ids = list(drafter.config.target_layer_ids or ())
    last = layer_ids.index(max(layer_ids)) * width
    drafter.fc.weight[:, last : last + width] += torch.eye(width, device=drafter.device)
    for (own, layer), hidden in zip(pairs, read, strict=True):  # [1, T, H]
        for name, projection in HEAD_NORMS.items():
            if name not in dict(layer.named_modules()):
                weight: Any = layer.get_submodule(projection).weight
                heads = nn.functional.linear(layer.input_layernorm(hidden), weight).float()
                own.get_submodule(name).weight.fill_(heads.square().mean().sqrt().item())


@contextmanager
def _watch_neurons(pairs: Sequence[tuple[Any, Any]]) -> Iterator[dict[int, dict[str, tuple[int, torch.Tensor]]]]:
    """Find the neurons that narrower MLPs keep, by the number of a layer and the name of a matrix, during a forward.

    With each come the dimension of the matrix that counts neurons and their numbers. A neuron adds its activation times
    its column of `down_proj`, so the product of their sizes ranks it.
    """
    found: dict[int, dict[str, tuple[int, torch.Tensor]]] = {}
    handles = []
    for number, (own, layer) in enumerate(pairs):
        modules = dict(layer.named_modules())
        down = modules.get(DOWN)
        width = own.get_submodule(DOWN).weight.shape[1]
        if not isinstance(down, nn.Linear) or not width < down.weight.shape[1]:
            continue

        def rank(module: nn.Module, inputs: tuple[torch.Tensor, ...], number: int = number, width: int = width) -> None:
            weight: Any = module.weight
            sizes = inputs[0].float().flatten(0, -2).abs().mean(0) * weight.float().norm(dim=0)
            kept = sizes.topk(width).indices.sort().values
            found[number] = {name: (int(name == DOWN), kept) for name in MLP}

        handles.append(down.register_forward_pre_hook(rank))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _take(own: Any, other: Any, name: str, kept: tuple[int, torch.Tensor] | None = None) -> None:
    """Copy the weight of a target's linear layer or norm; raise a `ValueError` if the two do not compute the same.

    With `kept`, a part of the weight is copied, and the whole must compute what its whole weight does.
    """
    weight: Any = getattr(other, "weight", torch.empty(0))
    part = weight
    if kept is not None and weight.dim() == own.weight.dim() and not weight.is_meta:
        part = weight.index_select(*kept)
    is_same = part.shape == own.weight.shape and weight.is_floating_point() and weight.element_size() > 1
    if is_same and not weight.is_meta:
        own.weight.copy_(part)
        probe = torch.linspace(-1, 2, weight.shape[-1], device=weight.device).to(weight.dtype)
        made = other(probe)
        if name in MAY_HAVE_BIAS and getattr(other, "bias", None) is not None:
            made = made - other.bias
        if kept is None:
            expected = own(probe.to(own.weight))
        else:
            expected = nn.functional.linear(probe, weight)
        if (expected - made.to(expected)).norm() <= SAME_TOL * made.norm():
            return
    expected = f"a plain {type(own).__name__} {tuple(own.weight.shape)} of 16 or 32 bits in memory, without additions"
    raise invalid_argument(
        f"{name} of a target to start from", expected, f"{type(other).__name__} {tuple(weight.shape)}", REMEDY
    )

"""A thin view of a target model: token embeddings, logits of a hidden state, captured hidden states.

The view calls the target's modules and never reads their weights, because offloading or quantisation may have moved or
converted them. The one exception is `readable_head`, which is lm_head if its weight can be read.

Shapes: B batch, T tokens, H hidden size, V vocabulary, L captured layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, output_capturing

from hf_domino.configuration.from_target import LENGTH_LIMITS

# Keyword arguments of the target's forward that have one entry per position. Positions are the last dimension, and
# sequences are the one before it.
PER_POSITION = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
# RoPE types whose frequencies change with the length of the input. With a block, they change at another point than with
# single tokens.
GROWING_ROPE_TYPES = ("dynamic", "longrope")
Captured = tuple[torch.Tensor, ...]  # hidden states `[B, T, H]` of each of the L layers

# Since Transformers 5.23, a list of requested hidden states counts like the full tuple, in which the embedding output
# comes first. Before, it counted from the first layer's output.
if hasattr(output_capturing, "selected_hidden_states"):
    _FIRST_LAYER_ENTRY = 1
else:
    _FIRST_LAYER_ENTRY = 0


class TargetModel:
    """View of a causal language model for drafting and training, which holds no state and is never saved.

    Args:
        model (`PreTrainedModel`): The target.
        layer_ids (`Sequence[int]`, *optional*, defaults to `()`): The L layers whose hidden states are captured, such
            as `config.layer_ids(model.config)` of a drafter's configuration.
    """

    def __init__(self, model: PreTrainedModel, layer_ids: Sequence[int] = ()):
        self.model = model
        self.text_config = model.config.get_text_config(decoder=True)
        self.layer_ids = layer_ids
        self._embeddings = model.get_input_embeddings()
        self._lm_head = model.get_output_embeddings()

    def embed(self, token_ids: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        """Return token embeddings `[..., H]` of ids `[...]`, scaled by `scale` or as the target's module does."""
        embeds = self._embeddings(token_ids)
        if scale is not None:
            embeds = embeds * (scale / getattr(self._embeddings, "embed_scale", 1.0))
        return embeds.to(token_ids.device)

    def logits(
        self,
        hidden_states: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor] | None = None,
        scaling: Any = None,  # a configuration with scales and caps to use instead of the target's
    ) -> torch.Tensor:
        """Return the target's logits `[..., V]` in fp32 for final hidden states `[..., H]`."""
        logits = (head or self._lm_head)(hidden_states.to(self.model.dtype)).to(hidden_states.device).float()
        return _scale_logits(logits, scaling or self.text_config)

    @property
    def readable_head(self) -> nn.Linear | None:
        """The lm_head if calling it is just a product with its weight, and the weight is in memory; else None."""
        # A quantised, offloaded, adapted, sharded or hooked head must be called.
        head = self._lm_head
        if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
            return None
        weight = head.weight
        shape = (head.out_features, head.in_features)
        is_whole = weight.shape == shape and weight.is_floating_point() and not weight.is_meta
        is_own = getattr(head.forward, "__func__", None) is nn.Linear.forward
        is_plain = is_own and not (hasattr(head, "_hf_hook") or has_hooks(head))
        return head if is_whole and is_plain else None

    def capture_kwargs(self, capture_all: bool = False, final: bool = False) -> dict[str, Any]:
        """Return keyword arguments that make the target's forward return the wanted hidden states and no others."""
        # `final` adds the last hidden state, which Transformers returns in the form that lm_head reads.
        layer_ids = list(self.layer_ids)
        if final:
            layer_ids.append(self.text_config.num_hidden_layers - 1)
        entries = [layer_id + _FIRST_LAYER_ENTRY for layer_id in layer_ids]
        return {"output_hidden_states": True if capture_all else entries, "return_dict": True}

    def captured(self, outputs: ModelOutput) -> Captured:
        """Return the L hidden states `[B, T, H]` of `layer_ids` from a forward's outputs."""
        hidden_states = outputs.hidden_states
        if hidden_states is None:
            raise ValueError(
                f"{type(self.model).__name__} returned no hidden states although output_hidden_states was requested: "
                "it cannot be a target."
            )
        # 1 if the embedding output comes first, else 0.
        offset = len(hidden_states) - self.text_config.num_hidden_layers
        captured = tuple(hidden_states[layer_id + offset] for layer_id in self.layer_ids)
        if captured[0].dim() != 3:
            raise ValueError(
                f"hidden states of {type(self.model).__name__} must have shape [batch, tokens, hidden], got "
                f"{list(captured[0].shape)}: targets with several parallel streams are not supported."
            )
        return captured

    @property
    def input_device(self) -> torch.device:
        """The device of token ids; see [`input_device`]."""
        return input_device(self.model)

    @cached_property
    def position_limit(self) -> int | None:
        """The maximum number of positions of the target, or None if positions are rotary or relative."""
        if getattr(self.text_config, "rope_parameters", None) is not None:
            return None
        limits = (getattr(self.text_config, field, None) for field in LENGTH_LIMITS)
        return next((limit for limit in limits if limit is not None), None)


def input_device(target: PreTrainedModel) -> torch.device:
    """Return the device for a target's token ids and for its helpers; if it is offloaded, the device of its hooks."""
    if target.device.type != "meta":
        return target.device
    hooks = (getattr(module, "_hf_hook", None) for module in target.modules())
    places = (getattr(one, "execution_device", None) for hook in hooks for one in getattr(hook, "hooks", (hook,)))
    return torch.device(next((place for place in places if place is not None), "cpu"))


def rounded_to(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype of a model's matrix products: its own, or autocast's."""
    device = input_device(model).type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return model.dtype


def ropes_of(target: PreTrainedModel) -> list[Mapping[str, Any]]:
    """Return the rotary parameters of a target: those of all layers, and those of each type of layer."""
    rope = getattr(target.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook is called before or after the module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _scale_logits(logits: torch.Tensor, text_config: Any) -> torch.Tensor:
    """Change logits as the target itself does: by scales (Cohere, Granite, Falcon-H1, Muse) and soft caps."""
    for field in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        if (scale := getattr(text_config, field, None)) is not None:
            logits = logits * scale
    if (divisor := getattr(text_config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(text_config, "final_logit_softcapping", None)) is not None:
        logits = torch.tanh(logits / cap) * cap
    return logits

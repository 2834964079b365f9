"""The configuration fields shared by all methods whose backbone drafts a full block at once."""

from __future__ import annotations

import math
from typing import Any

from huggingface_hub.dataclasses import strict

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import LAYER_TYPES, MOST_POSITIONS, POSITIVE, SLIDING, WIDTH, check_range
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.configuration.registry import config_classes


@strict
class BlockConfig(DominoConfig):
    """Configuration of a drafter whose backbone drafts a full block at once.

    Args:
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer; None for full
            attention in all layers.
        sliding_window (`int`, *optional*): Positions that a query of a sliding layer sees, its own included.
        sliding_window_non_causal (`bool`, *optional*, defaults to `False`): Whether a sliding layer's queries also see
            the positions after them in their block, as in the other layers.
        conv_kernel_size (`int`, *optional*): Positions that the convolutions around attention and MLP sum up, in
            `[1, block_size]`; None for no convolutions.
        conv_group_size (`int`, *optional*, defaults to 16): Neighbouring dimensions of a state that share a kernel; a
            divisor of `hidden_size`.
        layer_fusion (`bool`, *optional*, defaults to `False`): Whether each drafter layer adds its own weighted mean of
            the captured layers to the context features (DFly, arXiv 2607.25852).
        input_embedding_scale (`float`, *optional*): Factor of the embeddings that the backbone reads; None for the
            target's own factor, if it has one.
        output_multiplier (`float`, *optional*): Factor of the base logits. If this or `final_logit_softcapping` is set,
            the target's own scale and cap of the logits are not applied.
        final_logit_softcapping (`float`, *optional*): Soft cap of the base logits.
        kwargs: The fields of [`DominoConfig`].
    """

    layer_types: list[str] | None = None
    sliding_window: int | None = None
    sliding_window_non_causal: bool = False
    conv_kernel_size: int | None = None
    conv_group_size: int = 16
    layer_fusion: bool = False
    input_embedding_scale: float | int | None = None
    output_multiplier: float | int | None = None
    final_logit_softcapping: float | int | None = None

    ranges = DominoConfig.ranges | {"conv_group_size": WIDTH}

    @classmethod
    def sizes_for(cls, hidden_size: int) -> dict[str, int]:
        return {"conv_group_size": math.gcd(16, hidden_size)}

    @classmethod
    def headless(cls) -> Any:
        return next((each for each in config_classes() if issubclass(each, BlockConfig) and not each.head_layers), None)

    @property
    def has_sliding_layers(self) -> bool:
        """Whether any layer of the backbone has a sliding window."""
        return SLIDING in (self.layer_types or ())

    def is_sliding(self, layer_index: int) -> bool:
        """Whether this layer of the backbone has a sliding window."""
        return self.layer_types is not None and self.layer_types[layer_index] == SLIDING

    def check(self) -> None:
        super().check()
        for field in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            if (value := getattr(self, field)) is not None:
                check_range(field, value, *POSITIVE, is_whole=False)
        if (taps := self.conv_kernel_size) is not None:
            check_range("conv_kernel_size", taps, 1, self.block_size, "block_size, or None")
            check_range("conv_group_size", self.conv_group_size, 1, self.hidden_size, "hidden_size")
            if self.hidden_size % self.conv_group_size:
                expected = f"a divisor of {self.hidden_size}"
                raise invalid_argument("conv_group_size", expected, self.conv_group_size, "Numbers share kernels.")
        types = self.layer_types
        window = self.sliding_window
        if types is not None and (len(types) != self.num_hidden_layers or not set(types) <= set(LAYER_TYPES)):
            raise ValueError(
                f"layer_types must be one of {LAYER_TYPES} for each layer "
                f"(num_hidden_layers={self.num_hidden_layers}), got {types}."
            )
        if self.has_sliding_layers:
            hint = f"block_size={self.block_size}; layer_types has {SLIDING!r}"
            check_range("sliding_window", window, self.block_size, MOST_POSITIONS, hint)
        elif window is not None:
            raise ValueError(f"sliding_window must be None where no layer_types are {SLIDING!r}, got {window}.")

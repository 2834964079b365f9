"""Hidden states and attentions of one sequence, token by token, as plain `generate` returns them.

Shapes: W positions of a verification forward, C committed positions, K key positions, H hidden size, A heads.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from hf_domino.methods.scorer import along


class StepOutputs:
    """Collects the hidden states and attentions that the target's forwards return, if the caller asked for them.

    Args:
        generation_config (`GenerationConfig`): Provides `return_dict_in_generate`, `output_hidden_states` and
            `output_attentions`.
    """

    def __init__(self, generation_config: GenerationConfig):
        names: tuple[str, ...] = ()
        if generation_config.return_dict_in_generate:
            names = ("hidden_states", "attentions")
        self._steps: dict[str, list[Any]] = {name: [] for name in names if getattr(generation_config, f"output_{name}")}

    @property
    def forward_kwargs(self) -> dict[str, bool]:
        """Keyword arguments for the target's forward; empty if the caller asked for nothing."""
        return {f"output_{name}": True for name in self._steps}

    def add_prompt(self, outputs: ModelOutput) -> None:
        """Keep the outputs of the prefill, which belong to the first token."""
        for name, steps in self._steps.items():
            steps.append(getattr(outputs, name))

    def add_block(
        self,
        outputs: ModelOutput,
        num_kept: int,
        sliding_windows: list[int | None],
        path: torch.Tensor | None = None,
    ) -> None:
        """Keep the outputs that belong to the committed tokens of a round.

        Args:
            outputs (`ModelOutput`): The outputs of the verification forward, with hidden states `[1, W, H]` and
                attentions `[1, A, W, K]`.
            num_kept (`int`): Number of committed tokens.
            sliding_windows (`list[int | None]`): The sliding window of each attention layer; None for a layer that sees
                all positions.
            path (`torch.Tensor`, *optional*): The places of the committed tokens in the block, `[1, C]`. Defaults to
                the first places.
        """
        states = [along(path, layer) for layer in self._of(outputs, "hidden_states")]
        attentions = [_attention_along(path, layer) for layer in self._of(outputs, "attentions")]
        for index in range(num_kept):
            if "hidden_states" in self._steps:
                self._steps["hidden_states"].append(tuple(layer[:, index : index + 1] for layer in states))
            if "attentions" in self._steps:
                pairs = zip(attentions, sliding_windows, strict=True)
                self._steps["attentions"].append(tuple(_attention_of(layer, index, window) for layer, window in pairs))

    def _of(self, outputs: ModelOutput, name: str) -> Any:
        if name in self._steps:
            return getattr(outputs, name)
        return ()

    def results(self) -> dict[str, tuple]:
        """The fields for the output of `generate`, with a tuple over layers for each token."""
        return {name: tuple(steps) for name, steps in self._steps.items()}


def _attention_along(path: torch.Tensor | None, attention: torch.Tensor) -> torch.Tensor:
    """Choose from attention weights `[1, A, W, K]` those from positions of a path to the cache and to the path."""
    if path is None:
        return attention
    num_cached = attention.shape[3] - attention.shape[2]
    path = path[0].to(attention.device)
    columns = torch.cat((torch.arange(num_cached, device=path.device), num_cached + path))
    return attention[:, :, path][..., columns]


def _attention_of(attention: Any, index: int, window: int | None) -> Any:
    """One position's weights `[1, A, 1, keys]` from `[1, A, W, K]`, limited to the keys that it can see."""
    end = attention.shape[3] - (attention.shape[2] - 1 - index)
    start = max(0, end - window) if window else 0
    return attention[:, :, index : index + 1, start:end]

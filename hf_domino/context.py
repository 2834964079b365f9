"""Context features: which target layers a drafter reads, and the cache of their keys and values.

Shapes: B batch, S cached context length, Q block positions, A key/value heads, D head width.
"""

from __future__ import annotations

import torch

MAX_CAPTURED_LAYERS = 5  # what the released Domino and DFlash drafters read


def default_target_layer_ids(num_target_layers: int, num_captured: int = MAX_CAPTURED_LAYERS) -> list[int]:
    """Spread captured layers over the target, as the DFlash releases do (arXiv 2602.06036).

    The last layer is never picked: Transformers returns its hidden state after the final norm. Where the releases'
    rule would repeat a layer or leave the range (small targets), fewer layers are returned.

    Args:
        num_target_layers (`int`): Number of decoder layers of the target.
        num_captured (`int`, *optional*, defaults to 5): Layers wanted.

    Returns:
        `list[int]`: Increasing layer ids in `[0, num_target_layers - 2]`.

    Raises:
        ValueError: If the target has fewer than two layers.

    Example:
    ```python
    >>> from hf_domino.context import default_target_layer_ids
    >>> default_target_layer_ids(36)
    [1, 9, 17, 25, 33]

    ```
    """
    if num_target_layers < 2:
        raise ValueError(
            f"num_target_layers must be at least 2, got {num_target_layers}: a drafter reads inner layers."
        )
    for count in range(max(num_captured, 1), 1, -1):
        ids = [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
        if ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= num_target_layers - 2:
            return ids
    return [min(num_target_layers // 2, num_target_layers - 2)]


class ContextCache:
    """Keys and values of the context, per drafter layer, kept between rounds; a block's own are never stored.

    The buffers grow by doubling, so that a round appends in place instead of copying what is there.

    Args:
        num_layers (`int`): Number of drafter layers.
    """

    def __init__(self, num_layers: int):
        self.length = 0
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    def append(self, layer_index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new context keys and values `[B, A, S_new, D]` of one layer, and return all `[B, A, S, D]`.

        `length` moves only with [`~ContextCache.advance`], once all layers have stored theirs.
        """
        end = self.length + keys.shape[2]
        all_keys = self._keys[layer_index] = _store(self._keys[layer_index], keys, self.length, end)
        all_values = self._values[layer_index] = _store(self._values[layer_index], values, self.length, end)
        return all_keys[:, :, :end], all_values[:, :, :end]

    def advance(self, num_positions: int) -> None:
        """Count `num_positions` newly stored context positions."""
        self.length += num_positions


def _store(buffer: torch.Tensor | None, new: torch.Tensor, start: int, end: int) -> torch.Tensor:
    if buffer is None or buffer.shape[2] < end:
        grown = new.new_empty(*new.shape[:2], max(2 * end, 64), new.shape[3])
        if buffer is not None:
            grown[:, :, :start] = buffer[:, :, :start]
        buffer = grown
    buffer[:, :, start:end] = new
    return buffer

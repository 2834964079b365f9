"""Where the target lies while a drafter is trained: moved, or left where it was put."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def place_target(target: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a target to a device, unless its parts were given places: by a `device_map`, offloading or sharding."""
    weights = list(target.parameters())
    is_placed = any(hasattr(module, "_hf_hook") for module in target.modules()) or any(
        weight.is_meta or hasattr(weight, "device_mesh") or weight.device != target.device for weight in weights
    )
    if not is_placed and target.device != device:
        target.to(device)
    return target

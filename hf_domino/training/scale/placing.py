"""Where the target lies while a drafter is trained: moved, or left where it was put."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from transformers import PreTrainedModel

from hf_domino.formats.source import CONFIG

PIECES, PIECE_LENGTH = 64, 4096  # of a file of weights, in bytes


def place_target(target: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a target to a device, unless its parts were given places: by a `device_map`, offloading or sharding."""
    weights = list(target.parameters())
    is_placed = any(hasattr(module, "_hf_hook") for module in target.modules()) or any(
        weight.is_meta or hasattr(weight, "device_mesh") or weight.device != target.device for weight in weights
    )
    if not is_placed and target.device != device:
        target.to(device)
    return target


def files_digest(name: str) -> str | None:
    """Digest of a model's safetensors files: their sizes, their headers, and a few pieces of each.

    Args:
        name (`str`): A folder, or a name on the Hub whose files are in its cache.

    Returns:
        `str`, *optional*: None where there are no such files.
    """
    folder = Path(name)
    if not folder.is_dir():
        try:
            folder = Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            return None
    digest, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    if not paths or not (folder / CONFIG).is_file():
        return None
    for path in (folder / CONFIG, *paths):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            # A header is in the first of them; fine-tuning changes bytes everywhere.
            for start in range(0, size, max(PIECE_LENGTH, size // PIECES)):
                file.seek(start)
                digest.update(file.read(PIECE_LENGTH))
    return digest.hexdigest()[:16]

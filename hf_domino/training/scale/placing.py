"""Where the target lies while a drafter is trained: moved, left where it was put, or its two ends alone.

Training from cached hidden states calls the target's embeddings and its lm_head and nothing between them. So only
these are loaded; the rest stays in its file, from where accelerate's hooks would read it, were it ever called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_module
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from hf_domino._common.notices import notice
from hf_domino.formats.source import CONFIG
from hf_domino.target.loading import AutoTarget

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


def is_in_memory(target: PreTrainedModel) -> bool:
    """Whether all of a target is in memory: what [`load_ends`] loads is not, nor what is offloaded to disk.

    Args:
        target (`PreTrainedModel`): The target.
    """
    return not any(weight.is_meta for weight in target.parameters())


def load_ends(name: str, dtype: str, device: torch.device) -> PreTrainedModel | None:
    """Load a target of which only the embeddings and lm_head are in memory.

    Args:
        name (`str`): Folder or Hub name.
        dtype (`str`): As for [`~transformers.PreTrainedModel.from_pretrained`].
        device (`torch.device`): Where these two go.

    Returns:
        `PreTrainedModel`, *optional*: None where its file does not hold the other weights as the model has them: of
        quantised targets, and of most mixtures of experts.
    """
    config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None) is not None:
        return None
    with torch.device("meta"):
        shape = AutoTarget.from_config(config)
    ends = (shape.get_input_embeddings(), shape.get_output_embeddings())
    # The first process of several has "cpu:0", which accelerate takes for an accelerator.
    where = "cpu" if device.type == "cpu" else device
    device_map: dict[str, Any] = dict(_places(shape, ends, where))
    try:
        target = AutoTarget.from_pretrained(name, dtype=dtype, device_map=device_map).eval()
    except ValueError:  # Transformers': weights would have to be written anew
        notice(f"all of {name} is loaded, although only its embeddings and lm_head are used: its file holds no others.")
        return None
    # A hook moves what is there already, and lm_head with one would be called whole for a draft vocabulary's rows.
    remove_hook_from_module(target.get_output_embeddings())
    return target


def _places(module: nn.Module, ends: tuple, device: torch.device | str, path: str = "") -> Iterator[tuple[str, Any]]:
    """A device map that covers every module once: the ends on the device, what is beside them on the disk."""
    for name, child in module.named_children():
        if child in ends:
            yield path + name, device
        elif any(end in child.modules() for end in ends):
            yield from _places(child, ends, device, f"{path}{name}.")
        else:
            yield path + name, "disk"
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    yield from ((path + name, "disk") for name, _ in own)


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

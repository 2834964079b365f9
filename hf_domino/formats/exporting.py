"""Export a drafter as a folder that other projects can read: its config.json in their format, and safetensors.

Before anything is written, the export reports which serving engines will not accept the drafter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_domino._common.atomic_writes import atomic_writes, check_writable
from hf_domino._common.dtypes import dtype_of
from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.draft_vocabulary import NO_HEAD, beside, spread
from hf_domino.formats.engines import ENGINES, Unmet, unmet
from hf_domino.formats.fields import Fields, StoredConfig
from hf_domino.formats.loading import shown
from hf_domino.formats.registry import WRITTEN
from hf_domino.formats.source import CONFIG

logger = logging.get_logger(__name__)

MAX_SHARD_SIZE = "5GB"
ROTATED_WEIGHTS = re.compile(r"\.[qk]_(proj|norm)\.weight$")  # weights of rotated queries and keys
WEIGHTS = "model*.safetensors*"  # a single file, or shards and their index
_HEADLESS = Unmet("lm_head.weight", "stored beside d2t", "none", NO_HEAD)


@dataclass(frozen=True)
class Export:
    """An exported folder, with the engines that do not accept it and their reasons."""

    folder: Path
    format: str
    files: tuple[str, ...]
    refusals: Mapping[str, tuple[Unmet, ...]]  # by engine; empty for an engine that accepts it
    notes: tuple[str, ...] = ()  # what differs from the drafter, or is missing


def stored_config(config: DominoConfig, format: str = "specforge", dtype: torch.dtype | str = torch.bfloat16) -> Fields:
    """Return a drafter's config.json in another project's format, for weights of this dtype."""
    if format not in WRITTEN:
        raise invalid_argument(
            "format", f"one of {', '.join(WRITTEN)}", format, "save_pretrained writes hf_domino's own."
        )
    config.check_supports("export")
    described = deepcopy(config)
    described.dtype = dtype_of(dtype)
    return WRITTEN[format](described)


def refusals(stored: StoredConfig, config: DominoConfig) -> dict[str, tuple[Unmet, ...]]:
    """List the fields of a drafter's config.json, and of its target, that each engine does not accept."""
    described = {**stored, "target_model_type": config.target_model_type}  # it is not in other projects' files
    return {name: unmet(described, engine) for name, engine in ENGINES.items()}


def export(
    drafter: PreTrainedModel,
    folder: str | Path,
    format: str = "specforge",
    engine: str | None = None,
    dtype: torch.dtype | str = torch.bfloat16,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    target: PreTrainedModel | None = None,
) -> Export:
    """Write a drafter for other projects, with the arguments of [`~DominoDraftModel.export`]."""
    folder = Path(folder)
    if engine is not None and engine not in ENGINES:
        raise invalid_argument(
            "engine", f"one of {', '.join(ENGINES)}", engine, "Leave it out to see what each engine accepts."
        )
    stored = stored_config(drafter.config, format, dtype)
    own = own_tensors(drafter)
    note = None
    if drafter.config.draft_vocab_size is not None:
        has_one = format == "speculators"
        own, note = beside(own, drafter.config, target) if has_one else spread(own, drafter.config)
    found = refusals(stored, drafter.config)
    if note == NO_HEAD:
        found = {name: reasons or (_HEADLESS,) for name, reasons in found.items()}
    for name, reasons in found.items():
        message = f"{ENGINES[name].title} will not take this drafter: " + " ".join(map(str, reasons))
        if reasons and name == engine:
            raise ValueError(message)
        if reasons and engine is None:
            logger.warning(message)
    if note:
        logger.warning(note)
    tensors = {}
    for name, tensor in own.items():
        # Engines rotate halves instead of neighbours.
        if drafter.config.rope_interleaved and ROTATED_WEIGHTS.search(name):
            pairs = tensor.unflatten(0, (-1, drafter.config.head_dim // 2, 2))
            tensor = pairs.transpose(1, 2).flatten(0, 2)
        stored_as = name.replace("codebook.weight", "codebook")
        tensors[stored_as] = (tensor.to(dtype_of(dtype)) if tensor.is_floating_point() else tensor).contiguous()
    check_writable(folder, "the folder to export to")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise invalid_argument(
            "the folder to export to",
            "empty",
            str(folder),
            "Choose another folder, or pass overwrite=True (--overwrite).",
        )
    with atomic_writes(folder, WEIGHTS) as aside:  # an old shard or index would be read with the new ones
        save_torch_state_dict(tensors, aside, max_shard_size=max_shard_size, metadata={"format": "pt"})
        (aside / CONFIG).write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    files = (CONFIG, *sorted(path.name for path in folder.glob(WEIGHTS)))
    return Export(folder, format, files, found, (note,) if note else ())


def own_tensors(drafter: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a drafter's tensors; raise an error if they are not as its configuration describes, or not in memory."""
    tensors = drafter.state_dict()
    described = drafter.config.shapes()
    others = described.items() ^ {name: tuple(tensor.shape) for name, tensor in tensors.items()}.items()
    if others:
        remedy = "Merge an adapter (`merge_and_unload`), or load the drafter without quantisation."
        names = sorted({name for name, _ in others})
        raise invalid_argument("the drafter's tensors", "those of its configuration", shown(names), remedy)
    if away := sorted(name for name, tensor in tensors.items() if tensor.is_meta):
        raise invalid_argument("the drafter's tensors", "in memory", away, "Load the drafter without offloading.")
    return tensors

"""The tensors that a configuration describes, compared with a checkpoint's before anything is built.

A size that stands in config.json alone could ask for any amount of memory; the headers of the files say what is there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.configuration.checks import WIDTHS
from hf_domino.formats.format import Format, is_of_target
from hf_domino.formats.stored import AGAIN, StoredTensor
from hf_domino.target.compatibility import HEAD_MODULES

MOST_SHOWN = 4  # names in an error


def check_tensors(config: DominoConfig, found: Format, stored: Mapping[str, StoredTensor | torch.Tensor]) -> None:
    """Refuse a checkpoint whose tensors are not the ones that its configuration describes.

    Args:
        config ([`DominoConfig`]): Its configuration.
        found ([`Format`]): Its format.
        stored (`Mapping`): Its tensors by our names, or what the headers of its files say of them.

    Raises:
        ValueError: For a DFlash checkpoint read as Domino or the reverse, and for tensors that are missing, misshapen
            or of no drafter: it would draft otherwise than it was trained to.
    """
    _check_projector_type(config, stored)
    described = config.kind.shapes(config)
    parts = _told(config, "projector_type", "num_hidden_layers", "block_size")
    if missing := sorted(described.keys() - stored.keys()):
        remedy = "Save the drafter again with save_pretrained, or download the checkpoint again."
        raise refusal("the checkpoint's tensors", f"complete ({parts})", f"a file without {shown(missing)}", remedy)
    for name in sorted(described):
        if (shape := stored[name].shape) != described[name]:
            sizes = _told(config, *WIDTHS, "vocab_size", "draft_vocab_size")
            remedy = "Load it with the configuration it was saved with."
            raise refusal(f"the checkpoint's {name}", f"of shape {described[name]} ({sizes})", shape, remedy)
    if extra := sorted(name for name in stored.keys() - described.keys() if not is_of_target(name)):
        remedy = "hf_domino knows no such part of a drafter; load a checkpoint without it."
        expected = f"those of a drafter ({found.name}; {parts})"
        raise refusal("the checkpoint's tensors", expected, f"also {shown(extra)}", remedy)


def _told(config: DominoConfig, *fields: str) -> str:
    return ", ".join(f"{field}={getattr(config, field)!r}" for field in fields)


def check_finite(tensors: Mapping[str, torch.Tensor], place: str) -> None:
    """Refuse weights that are no numbers: all drafts would be rejected, and nobody would know why.

    Args:
        tensors (`Mapping`): By name; those that are quantised or not in memory are passed over.
        place (`str`): Whose they are.

    Raises:
        ValueError: Naming the first tensor with NaN or infinity in it.
    """
    for name, tensor in tensors.items():
        is_read = type(tensor) is torch.Tensor and not tensor.is_meta
        if is_read and not torch.stack(tensor.aminmax()).isfinite().all():
            raise refusal(f"{place} {name}", "finite", "NaN or infinity", AGAIN)


def _check_projector_type(config: DominoConfig, stored: Collection[str]) -> None:
    has_head = config.kind.has_correction_head
    parts = {name.split(".")[0] for name in stored}
    if has_head and parts.isdisjoint(HEAD_MODULES):
        raise refusal(
            "projector_type",
            "'dflash' for this checkpoint (it has no prefix_gru and embed_proj: plain DFlash)",
            config.projector_type,
            "Set projector_type='dflash' in its configuration, or load a Domino checkpoint.",
        )
    if not has_head and (surplus := sorted(name for name in stored if name.split(".")[0] in HEAD_MODULES)):
        raise refusal(
            "projector_type",
            f"'domino' for this checkpoint (it has a correction head: {', '.join(surplus)})",
            config.projector_type,
            "Set projector_type='domino' in its configuration, or load a DFlash checkpoint.",
        )


def shown(names: list[str]) -> str:
    """The names of tensors for an error; the first of them, and how many there are, where they are many."""
    first = ", ".join(names[:MOST_SHOWN])
    return first if len(names) <= MOST_SHOWN else f"{first} ... ({len(names)} tensors)"

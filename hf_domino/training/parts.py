"""Which parts of a drafter are trained: all of it, or the correction head alone, perhaps a new one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.methods import KINDS
from hf_domino.methods.kind import HEAD_FIELDS
from hf_domino.training.arguments import DominoTrainingArguments

OF_A_HEAD = ("projector_type", "pure_draft_prefix_len", *HEAD_FIELDS)
BLOCK_SIZE, TAPS = "block_size", "conv_kernel_size"  # no other weight depends on them


def choose_parts(drafter: DominoDraftModel, args: DominoTrainingArguments) -> None:
    """Freeze what is not trained.

    Args:
        drafter (`DominoDraftModel`): The drafter, in fp32.
        args (`DominoTrainingArguments`): For `train_only`.

    Raises:
        ValueError: If the drafter has no such part.
    """
    kind = drafter.config.kind
    for name, parameter in drafter.named_parameters():
        if name.split(".")[0] in kind.frozen:
            parameter.requires_grad_(False)
    if args.train_only == "head":
        if not drafter.has_correction_head:
            gets_one = drafter.config.projector_type == "dflash"
            remedy = (
                "Give it a new one: projector_type='domino' beside drafter." if gets_one else "Leave train_only out."
            )
            raise refusal("the drafter of train_only='head'", "one with a correction head", kind.title, remedy)
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in kind.head_modules())


def go_on_from(drafter: DominoDraftModel, overrides: Mapping[str, Any]) -> DominoDraftModel:
    """A drafter to be trained further, with another `block_size`, convolutions, or a head for DFlash.

    New parts change nothing until they are trained. `overrides` are what a run lets pass, or none.
    """
    if not overrides:
        return drafter
    config = copy.deepcopy(drafter.config)
    if "projector_type" in overrides:
        if config.projector_type != "dflash":
            remedy = "Leave projector_type out, or start from a DFlash drafter."
            raise refusal("the drafter of a new head", "plain DFlash", config.kind.title, remedy)
        overrides = {**KINDS[overrides["projector_type"]].defaults, **overrides}
    if (taps := config.conv_kernel_size) not in (None, overrides.get(TAPS, taps)):
        raise refusal(f"{TAPS} of the drafter", taps, overrides[TAPS], "Its weights are of that.")
    for name, value in overrides.items():
        setattr(config, name, value)
    config.check()
    result = DominoDraftModel(config)
    result.load_state_dict(drafter.state_dict(), strict=False)
    return result

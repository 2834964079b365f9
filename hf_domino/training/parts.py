"""Which parts of a drafter are trained: all of it, or the correction head alone, perhaps a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino.methods import DominoConfig, DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments

BLOCK_SIZE, TAPS = "block_size", "conv_kernel_size"  # no other weight depends on them


def fields_of_head(method: type[DominoConfig]) -> set[str]:
    """Name the fields that a method's correction head adds to those of its backbone; none without a head."""
    headless = method.headless()
    if headless is None or not method.head_layers:
        return set()
    own = {field.name for field in fields(method)} - {field.name for field in fields(headless)}
    return {"projector_type", "pure_draft_prefix_len"} | own


def choose_parts(drafter: DominoDraftModel, args: DominoTrainingArguments) -> None:
    """Freeze what is not trained.

    Args:
        drafter (`DominoDraftModel`): The drafter, in fp32.
        args (`DominoTrainingArguments`): For `train_only`.

    Raises:
        ValueError: If the drafter has no such part.
    """
    config = drafter.config
    for name, parameter in drafter.named_parameters():
        if name.split(".")[0] in config.frozen:
            parameter.requires_grad_(False)
    if args.train_only == "head":
        if not drafter.has_correction_head:
            gets_one = config.headless() is type(config)
            remedy = (
                "Give it a new one: projector_type='domino' beside drafter." if gets_one else "Leave train_only out."
            )
            raise refusal("the drafter of train_only='head'", "one with a correction head", config.title, remedy)
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in config.head_modules())


def go_on_from(drafter: DominoDraftModel, overrides: Mapping[str, Any]) -> DominoDraftModel:
    """A drafter to be trained further, with another `block_size`, convolutions, or a head if it has none.

    New parts change nothing until they are trained. `overrides` are what a run lets pass, or none.
    """
    if not overrides:
        return drafter
    config = drafter.config
    if "projector_type" in overrides:
        method = DominoConfig.of_method(overrides["projector_type"])
        headless = method.headless()
        if headless is not type(config):
            expected = "one of the same backbone" if headless is None else f"plain {headless.title}"
            remedy = "Leave projector_type out, or start from such a drafter."
            raise refusal("the drafter of a new head", expected, config.title, remedy)
        overrides = {**method.defaults, **overrides}
    if (taps := getattr(config, TAPS, None)) not in (None, overrides.get(TAPS, taps)):
        raise refusal(f"{TAPS} of the drafter", taps, overrides[TAPS], "Its weights are of that.")
    result = DominoDraftModel(config.changed(**overrides))
    result.load_state_dict(drafter.state_dict(), strict=False)
    return result

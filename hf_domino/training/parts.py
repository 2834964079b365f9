"""Which parts of a drafter are trained: all of it, LoRA over it, or the correction head alone, perhaps a new one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_domino._common.refusal import refusal
from hf_domino.drafter.adapters import add_lora
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.kinds import KINDS
from hf_domino.target.compatibility import HEAD_MODULES
from hf_domino.training.arguments import DominoTrainingArguments

OF_A_HEAD = ("projector_type", "gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
BLOCK_SIZE = "block_size"  # no weight depends on it


def choose_parts(drafter: DominoDraftModel, args: DominoTrainingArguments) -> nn.Module:
    """Freeze what is not trained.

    Args:
        drafter (`DominoDraftModel`): The drafter, in fp32.
        args (`DominoTrainingArguments`): For `lora_rank`, `lora_alpha` and `train_only`.

    Returns:
        `nn.Module`: What the trainer trains and saves: the drafter, or PEFT's wrapper around it.

    Raises:
        ValueError: If the drafter has no such part, or no name that an adapter could be loaded over.
    """
    if args.lora_rank is not None and args.lora_alpha is not None:
        return add_lora(drafter, args.lora_rank, args.lora_alpha)
    if args.train_only == "head":
        if not drafter.has_correction_head:
            kind, gets_one = drafter.config.kind.title, drafter.config.projector_type == "dflash"
            remedy = (
                "Give it a new one: projector_type='domino' beside drafter." if gets_one else "Leave train_only out."
            )
            raise refusal("the drafter of train_only='head'", "one with a correction head", kind, remedy)
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in HEAD_MODULES)
    return drafter


def check_start(drafter: str | None, overrides: Mapping[str, Any], args: DominoTrainingArguments) -> None:
    """Refuse trainings that cannot start from what they are given, before anything is loaded.

    Args:
        drafter (`str`, *optional*): The drafter to start from; None for a new one.
        overrides (`Mapping`): Fields of its shape that were given.
        args (`DominoTrainingArguments`): For `lora_rank` and `train_only`.

    Raises:
        ValueError: Naming the field.
    """
    for name in ("lora_rank", "train_only"):
        if drafter is None and getattr(args, name) is not None:
            remedy = "Name the drafter it starts from: --drafter FOLDER."
            raise refusal(f"{name} of a new drafter", None, getattr(args, name), remedy)
    if drafter is None or not overrides:
        return
    of_head = set(overrides) - {BLOCK_SIZE}
    if of_head and (overrides.get("projector_type") != "domino" or not of_head <= set(OF_A_HEAD)):
        raise ValueError(
            f"{', '.join(name for name in overrides if name in of_head)} must not be set with drafter={drafter!r}: the "
            f"drafter has its own shape. Only another block_size, or with projector_type=domino a new correction head "
            f"for a DFlash drafter, goes with its weights."
        )
    if args.lora_rank is not None:
        remedy = "An adapter has the shape of its drafter: leave one of them out."
        raise refusal(f"lora_rank with {', '.join(overrides)}", None, args.lora_rank, remedy)


def go_on_from(drafter: DominoDraftModel, overrides: Mapping[str, Any]) -> DominoDraftModel:
    """A drafter to be trained further, with blocks of another length or a new correction head if that is asked for.

    Args:
        drafter (`DominoDraftModel`): Trained before; changed in place where it keeps its head.
        overrides (`Mapping`): `block_size`, fields of a head among `OF_A_HEAD`, or none.

    Raises:
        ValueError: If there is a head already, or blocks are shorter than can be.
    """
    block_size = overrides.get(BLOCK_SIZE, drafter.config.block_size)
    if block_size != drafter.config.block_size:
        drafter.config.kind.refuse_what_it_lacks(BLOCK_SIZE)
    drafter.config.block_size = block_size
    drafter.config.check()
    head = {name: value for name, value in overrides.items() if name != BLOCK_SIZE}
    return add_head(drafter, head) if head else drafter


def add_head(drafter: DominoDraftModel, overrides: Mapping[str, Any]) -> DominoDraftModel:
    """A DFlash drafter with a new correction head, which drafts as before until it is trained.

    Args:
        drafter (`DominoDraftModel`): A DFlash drafter.
        overrides (`Mapping`): Fields of the head, among `OF_A_HEAD`.

    Raises:
        ValueError: If it has a correction head already.
    """
    if drafter.config.projector_type != "dflash":
        remedy = "Leave projector_type out, or start from a DFlash drafter."
        raise refusal("the drafter of a new head", "plain DFlash", drafter.config.kind.title, remedy)
    config = copy.deepcopy(drafter.config)
    for name, value in {**KINDS["domino"].defaults, **overrides}.items():
        setattr(config, name, value)
    result = DominoDraftModel(config)
    result.load_state_dict(drafter.state_dict(), strict=False)
    return result

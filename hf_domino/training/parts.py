"""Choose which part of a drafter is trained: all of it, an adapter over it, or only its correction head, old or new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.registry import config_classes
from hf_domino.formats.adapters import check_start
from hf_domino.formats.fields import CONVOLUTION, FUSION
from hf_domino.methods import DominoConfig, DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments

# A drafter that is trained further can have blocks of another size, and convolutions (`CONVOLUTION`) if it has none.
BLOCK_SIZE = "block_size"


def fields_of_head(method: type[DominoConfig]) -> set[str]:
    """Return the fields that a method's correction head adds to those of its backbone; none without a head."""
    headless = method.headless()
    if headless is None or not method.head_layers:
        return set()
    own = {field.name for field in fields(method)} - {field.name for field in fields(headless)}
    return {"projector_type", "pure_draft_prefix_len"} | own


def choose_parts(given: Any, drafter: DominoDraftModel, args: DominoTrainingArguments) -> Any:
    """Freeze the parts of a drafter that are not trained, and add an adapter with `use_peft`.

    Args:
        given (`DominoDraftModel` or `PeftModel`): The drafter, or PEFT's wrapper around it.
        drafter (`DominoDraftModel`): The drafter itself, in fp32.
        args (`DominoTrainingArguments`): Arguments, of which `train_only`, `use_peft` and those of [`add_lora`] are
            read.

    Returns:
        `DominoDraftModel` or `PeftModel`: The model that is trained and saved.

    Raises:
        ValueError: If the drafter lacks the part to train, if `use_peft` or `train_only` is set although the drafter
            already has an adapter, or if that adapter could not be loaded again.
    """
    if hasattr(given, "peft_config"):
        for name in ("use_peft", "train_only"):
            if value := getattr(args, name):
                raise invalid_argument(
                    f"{name} of an adapted drafter", "left out", value, "Its own adapter is trained."
                )
        for adapter in given.peft_config.values():
            check_start(adapter, "the adapter to train")
        return given
    config = drafter.config
    for name, parameter in drafter.named_parameters():
        if name.split(".")[0] in config.frozen:
            parameter.requires_grad_(False)
    if args.train_only == "head":
        if not drafter.has_correction_head:
            remedy = "Leave train_only out."
            if config.headless() is type(config):
                heads = [method.projector_type for method in config_classes() if fields_of_head(method)]
                remedy = f"Give it a new head: set projector_type={' or '.join(map(repr, heads))} as well."
            raise invalid_argument(
                "the drafter of train_only='head'", "one with a correction head", config.title, remedy
            )
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.split(".")[0] in config.head_modules())
    return add_lora(drafter, args) if args.use_peft else given


def add_lora(drafter: DominoDraftModel, args: DominoTrainingArguments) -> Any:
    """Add a LoRA adapter to a drafter, and freeze everything else.

    Args:
        drafter (`DominoDraftModel`): The drafter. It must come from a folder or the Hub, because the adapter stores
            this name.
        args (`DominoTrainingArguments`): Arguments, of which the LoRA fields and `output_dir` are read.

    Returns:
        `PeftModel`: The model that is trained and saved.

    Raises:
        ValueError: If the adapter could not be loaded again, or the drafter has no layer of a given name.
    """
    from peft import LoraConfig, get_peft_model

    name = drafter.name_or_path
    if not name or Path(name).absolute() == Path(str(args.output_dir)).absolute():
        expected = "one loaded from a folder or the Hub other than output_dir"
        remedy = "The adapter stores only its name."
        raise invalid_argument("the drafter of use_peft", expected, name or "a new one", remedy)
    layers = adaptable_layers(drafter)
    wanted = args.lora_target_modules or ["all-linear"]
    if wanted == ["all-linear"]:
        wanted = [layer for layer, is_linear in layers.items() if is_linear]
    unknown = [end for end in wanted if not any(f".{layer}".endswith(f".{end}") for layer in layers)]
    if unknown:
        expected = f"'all-linear', or among {', '.join(layers)}"
        raise invalid_argument("lora_target_modules", expected, unknown, "Give the names of layers, or how these end.")
    sizes: dict[str, Any] = {"r": args.lora_r, "lora_alpha": args.lora_alpha, "lora_dropout": args.lora_dropout}
    return get_peft_model(drafter, LoraConfig(**sizes, target_modules=wanted))


def adaptable_layers(drafter: DominoDraftModel) -> dict[str, bool]:
    """Return the names of the layers that an adapter can change, with True for linear ones.

    A module that every layer of the backbone has, such as `q_proj`, appears once.
    """
    found = {}
    for name, module in drafter.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and name.split(".")[0] not in drafter.config.frozen:
            in_layers = name.startswith("layers.")
            found[name.rpartition(".")[2] if in_layers else name] = isinstance(module, nn.Linear)
    return found


def extend_drafter(drafter: DominoDraftModel, overrides: Mapping[str, Any]) -> DominoDraftModel:
    """Return a drafter to train further, with another `block_size`, with convolutions, or with a head if it has none.

    New parts do not change its drafts until they are trained. `overrides` must be empty or fields that
    [`~training.run.check_fields`] allows.
    """
    if not overrides:
        return drafter
    config = drafter.config
    if "projector_type" in overrides:
        method = DominoConfig.of_method(overrides["projector_type"])
        headless = method.headless()
        if headless is not type(config):
            expected = "one of the same backbone"
            if headless is not None:
                expected = f"plain {headless.title}"
            remedy = "Leave projector_type out, or start from such a drafter."
            raise invalid_argument("the drafter of a new head", expected, config.title, remedy)
        overrides = {**method.defaults, FUSION: config.layer_fusion, **overrides}
    if (taps := getattr(config, CONVOLUTION, None)) not in (None, overrides.get(CONVOLUTION, taps)):
        raise invalid_argument(
            f"{CONVOLUTION} of the drafter",
            taps,
            overrides[CONVOLUTION],
            "Its weights were trained for these: leave it out.",
        )
    result = DominoDraftModel(config.changed(**overrides))
    own = config.shapes()
    if others := [name for name, shape in result.config.shapes().items() if own.get(name, shape) != shape]:
        changed = {name: value for name, value in overrides.items() if value != getattr(config, name, None)}
        remedy = f"Its {others[0]} is of that size: leave it out, or train a new drafter."
        raise invalid_argument(f"{', '.join(changed)} of the drafter", "left out", changed, remedy)
    result.load_state_dict(drafter.state_dict(), strict=False)
    return result

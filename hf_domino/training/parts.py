"""Which parts of a drafter are trained: all of it, an adapter over it, or the correction head alone, perhaps new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.registry import config_classes
from hf_domino.methods import DominoConfig, DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments

# No other weight depends on them.
BLOCK_SIZE = "block_size"
TAPS = "conv_kernel_size"
FUSION = "layer_fusion"  # changes what a trained drafter drafts


def fields_of_head(method: type[DominoConfig]) -> set[str]:
    """Name the fields that a method's correction head adds to those of its backbone; none without a head."""
    headless = method.headless()
    if headless is None or not method.head_layers:
        return set()
    own = {field.name for field in fields(method)} - {field.name for field in fields(headless)}
    return {"projector_type", "pure_draft_prefix_len"} | own


def choose_parts(given: Any, drafter: DominoDraftModel, args: DominoTrainingArguments) -> Any:
    """Freeze what is not trained.

    Args:
        given (`DominoDraftModel` or `PeftModel`): The drafter, or PEFT's wrapper around it.
        drafter (`DominoDraftModel`): The drafter itself, in fp32.
        args (`DominoTrainingArguments`): For `train_only` and `use_peft`.

    Returns:
        `DominoDraftModel` or `PeftModel`: What is trained and saved.

    Raises:
        ValueError: If the drafter has no such part, or a wrapper has an adapter already.
    """
    if hasattr(given, "peft_config"):
        for name in ("use_peft", "train_only"):
            if value := getattr(args, name):
                raise invalid_argument(
                    f"{name} of an adapted drafter", "left out", value, "Its own adapter is trained."
                )
        return _without_card(given)
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
    """Put LoRA into a drafter, and freeze all else.

    Args:
        drafter (`DominoDraftModel`): The drafter, loaded from a folder or the Hub, which the adapter will name.
        args (`DominoTrainingArguments`): For the fields of LoRA.

    Returns:
        `PeftModel`: What is trained and saved.

    Raises:
        ValueError: If the adapter could not be loaded again, or there is no such layer.
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
    return _without_card(get_peft_model(drafter, LoraConfig(**sizes, target_modules=wanted)))


def _without_card(adapted: Any) -> Any:
    """Keep PEFT from writing a card, which would say nothing of a drafter, and from looking for its embeddings."""
    adapted.create_or_update_model_card = lambda *_: None  # the trainer writes one
    adapted.save_pretrained = partial(adapted.save_pretrained, save_embedding_layers=False)
    return adapted


def adaptable_layers(drafter: DominoDraftModel) -> dict[str, bool]:
    """Name the layers that an adapter can change, those of the backbone once for all; True for linear ones."""
    found = {}
    for name, module in drafter.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and name.split(".")[0] not in drafter.config.frozen:
            in_layers = name.startswith("layers.")
            found[name.rpartition(".")[2] if in_layers else name] = isinstance(module, nn.Linear)
    return found


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
            expected = "one of the same backbone"
            if headless is not None:
                expected = f"plain {headless.title}"
            remedy = "Leave projector_type out, or start from such a drafter."
            raise invalid_argument("the drafter of a new head", expected, config.title, remedy)
        overrides = {**method.defaults, FUSION: config.layer_fusion, **overrides}
    if (taps := getattr(config, TAPS, None)) not in (None, overrides.get(TAPS, taps)):
        raise invalid_argument(
            f"{TAPS} of the drafter", taps, overrides[TAPS], "Its weights were trained for these: leave it out."
        )
    result = DominoDraftModel(config.changed(**overrides))
    own = config.shapes()
    if others := [name for name, shape in result.config.shapes().items() if own.get(name, shape) != shape]:
        changed = {name: value for name, value in overrides.items() if value != getattr(config, name, None)}
        remedy = f"Its {others[0]} is of that size: leave it out, or train a new drafter."
        raise invalid_argument(f"{', '.join(changed)} of the drafter", "left out", changed, remedy)
    result.load_state_dict(drafter.state_dict(), strict=False)
    return result

"""The way of a call of `generate` or `pipeline` whose assistant is a drafter; the patch leads here.

Kept apart from the patch because it needs all of decoding, which nobody pays for before the first such call.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationMixin, PreTrainedModel, StaticCache
from transformers.generation import GenerationMode

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import invalid_argument, invalid_field
from hf_domino._common.notices import logger, notice
from hf_domino.decoding.loop import assisted_decoding
from hf_domino.formats.adapters import drafter_config, stored_config
from hf_domino.formats.dflash_config import MUSE_GLIMMER
from hf_domino.formats.registry import format_of
from hf_domino.formats.source import ADAPTER_CONFIG, CONFIG, check_is_target, check_source
from hf_domino.integration.call_checks import check_generation, check_prepared, check_static
from hf_domino.integration.default_drafter import Attached, detach, set_default
from hf_domino.methods import DominoDraftModel
from hf_domino.target.compatibility import check_target, fitting_drafter, unwrapped
from hf_domino.target.identity import check_recorded, recognise
from hf_domino.target.view import input_device

_named: WeakKeyDictionary[PreTrainedModel, dict[tuple, DominoDraftModel]] = WeakKeyDictionary()


def check_call(
    target: PreTrainedModel, generation_mode: GenerationMode, generation_config: Any, mode_kwargs: dict[str, Any]
) -> GenerationMode:
    """Refuse what a drafter cannot serve, and name the mode that Transformers shall check the rest as."""
    # Transformers' own assisted loop takes neither several sequences at once nor recurrent states; ours does both.
    drafter = mode_kwargs["assistant_model"]
    check_generation(target, drafter, generation_config, generation_mode)
    recognise(drafter.config, target)
    # Transformers refuses a second tokenizer for equal vocabularies; a drafter has none of its own
    mode_kwargs.pop("assistant_tokenizer", None)
    return GenerationMode.SAMPLE


def decode(target: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """Check the inputs and decode; arguments and result are those of Transformers' `_assisted_decoding`."""
    check_prepared(target, kwargs["assistant_model"], input_ids, kwargs)
    return _decode(target, input_ids, kwargs)


def _decode(target: PreTrainedModel, input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> Any:
    unused = ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor", "synced_gpus")
    kept = {name: value for name, value in kwargs.items() if name not in unused}
    if kept["generation_config"].cache_implementation is None and prefers_fixed_shape(input_ids):
        kept |= _in_fixed_shape(target, kwargs["assistant_model"], len(input_ids), kept)
    default = torch.get_default_device()
    host = torch.device("cpu")
    # Tensors without a device are made on the host, unless the default device is the target's: entering takes time.
    with nullcontext() if default in (host, input_ids.device) else host:
        return assisted_decoding(target, input_ids, drafter=kwargs["assistant_model"], **kept)


def prefers_fixed_shape(input_ids: torch.Tensor) -> bool:
    """Whether rounds run in fixed shape unless a call says otherwise: on a GPU, where they wait for launches."""
    return input_ids.is_cuda


def _in_fixed_shape(
    target: PreTrainedModel, drafter: DominoDraftModel, batch_size: int, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """What changes in a call so that it runs in fixed shape; where it cannot, why its rounds grow."""
    if getattr(kwargs[CACHE], "_is_user_defined", False):
        return {"why_growing": "the call passed a cache of its own"}
    config = copy.copy(kwargs["generation_config"])
    config.cache_implementation = "static"
    if config.compile_config is None:
        config.disable_compile = True  # takes a minute, so that a call must name a static cache to get it
    cache = StaticCache(config=target.config.get_text_config(decoder=True), max_cache_len=1)  # for its kinds of layers
    try:
        check_static(target, drafter, batch_size, cache, config, kwargs.get("attention_mask"))
    except ValueError as error:
        if invalid_field(error) is None:
            raise
        return {"why_growing": str(error)}
    return {"generation_config": config, CACHE: cache}


# --- by the default drafter -------------------------------------------------------------------------------------


def default_pair(target: Any, drafter: Any) -> tuple[PreTrainedModel, DominoDraftModel]:
    """The model that generates in `target`, and the drafter that is meant, once both fit."""
    target = unwrapped(target)
    if not isinstance(target, GenerationMixin):
        remedy = "Pass the model itself, such as pipeline.model."
        raise invalid_argument("the target", "a model that generates", type(target).__name__, remedy)
    if isinstance(drafter, (str, os.PathLike)):
        drafter = named(target, drafter)
    drafter = fitting_drafter(drafter, target, "the default drafter")
    recognise(drafter.config, target)
    return target, drafter


def meet(target: PreTrainedModel, name: str) -> None:
    """Attach the drafter of a name to a target if it was made for that, and say whether it was."""
    try:
        check_recorded(drafter_config(name), target)
        set_default(*default_pair(target, name))
        notice(f"{name} drafts for {target.name_or_path}.")
    except ValueError as error:
        if invalid_field(error) is None:
            raise
        detach(target)
        notice(f"{target.name_or_path} generates without a drafter: {error}")


def count_mode(default: Attached, mode: GenerationMode) -> None:
    """Count a call whose mode, such as beam search, never asks for a drafter."""
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        default.count(mode.value, f"{mode.value} cannot be drafted.")


def decode_by_default(
    default: Attached, original: Callable, target: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Decode a prepared call with the default drafter, or by the original method where that cannot be."""
    config = kwargs.get("generation_config")
    drafted = kwargs | {"assistant_model": default.drafter}
    # `generate` names it; who gives it by place drives this loop himself. A target may also draft for another model.
    if config is None or getattr(config, "is_assistant", False):
        return original(target, input_ids, *args, **kwargs)
    try:
        check_call(target, config.get_generation_mode(default.drafter), config, drafted)
        check_prepared(target, default.drafter, input_ids, kwargs)
    except ValueError as error:
        if (field := invalid_field(error)) is None:
            raise
        default.count(field, str(error))
        return original(target, input_ids, **kwargs)
    default.count()
    output = _decode(target, input_ids, drafted)
    stats = default.drafter.stats
    logger.info(stats.summary)
    if default.on_call is not None:
        default.on_call(getattr(output, "sequences", output), kwargs.get("attention_mask"), stats)
    return output


# --- by name ----------------------------------------------------------------------------------------------------


def check_names(model: Any, drafter: str | os.PathLike) -> None:
    """Refuse a wrong name, and a drafter as the target, before a pipeline loads anything."""
    check_source(os.fspath(drafter), "assistant_model")
    if isinstance(model, (str, os.PathLike)):
        check_is_target(os.fspath(model), "model")


def pipeline_drafter(target: PreTrainedModel, assistant: Any, **download: Any) -> DominoDraftModel | None:
    """The drafter a pipeline was given, or the one of a path or Hub name; None if that holds another model."""
    if not target.can_generate():
        return None
    if isinstance(assistant, (str, os.PathLike)):
        check_source(os.fspath(assistant), "assistant_model", **download)
        found = format_of(stored_config(assistant, download))
        if found in (None, MUSE_GLIMMER):  # which Transformers runs itself
            return None
        drafter = DominoDraftModel.from_pretrained(assistant, dtype=target.dtype, **download)
        assistant = drafter.to(input_device(target))
    check_target(assistant.config, target)
    return assistant


def named(target: PreTrainedModel, name: Any, **download: Any) -> DominoDraftModel:
    """The drafter of a folder or Hub name, loaded once for a target where it is and as it computes."""
    loaded = _named.setdefault(target, {})
    files = [Path(name).absolute() / file for file in (CONFIG, ADAPTER_CONFIG)]
    saved = tuple((file, file.stat().st_mtime_ns) for file in files if file.is_file()) or os.fspath(name)
    key = (saved, target.dtype, input_device(target), download.get("revision"), download.get("subfolder"))
    if key not in loaded:
        found = pipeline_drafter(target, name, **download)
        if found is None:
            remedy = "A model of another kind must be loaded first."
            raise invalid_argument("the name of a drafter", "that of a folder or on the Hub", os.fspath(name), remedy)
        loaded[key] = found
    return loaded[key]

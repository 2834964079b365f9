"""Handle calls of `generate` and `pipeline` whose assistant is a drafter; the patch passes them on to this module.

It is separate from the patch because it imports all of decoding, and nobody should pay for that before the first such
call.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import invalid_argument, invalid_field, may_restart
from hf_domino._common.notices import logger, notice
from hf_domino.decoding.alignment import unalignable
from hf_domino.decoding.caches import empty
from hf_domino.decoding.lookup_memory import LookupMemory, check_memory
from hf_domino.decoding.loop import assisted_decoding
from hf_domino.formats.adapters import drafter_config, stored_config, trace_of_files
from hf_domino.formats.dflash_config import MUSE_GLIMMER
from hf_domino.formats.registry import format_of
from hf_domino.formats.source import RECYCLING, check_is_target, check_source
from hf_domino.integration.call_checks import check_generation, check_prepared
from hf_domino.integration.default_drafter import Attached, detach, set_default
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.named import drafter_named
from hf_domino.pair import drafter_called, is_recycling
from hf_domino.targets.compatibility import check_target, fitting_drafter, unwrapped
from hf_domino.targets.identity import check_recorded, recognise
from hf_domino.targets.view import input_device


def check_call(
    target: PreTrainedModel, generation_mode: GenerationMode, generation_config: Any, mode_kwargs: dict[str, Any]
) -> GenerationMode:
    """Raise an error if a drafter cannot serve a call; return the mode in which Transformers validates the rest."""
    drafter = mode_kwargs["assistant_model"]
    check_generation(target, drafter, generation_config, generation_mode)
    # A drafter has no tokenizer of its own, and Transformers rejects a second one if the vocabularies are equal.
    mode_kwargs.pop("assistant_tokenizer", None)
    # For assisted generation, Transformers would reject batches and recurrent states, both of which our loop supports.
    return GenerationMode.SAMPLE


def decode(target: PreTrainedModel, input_ids: torch.Tensor, **kwargs: Any) -> Any:
    """Validate the inputs and decode, with the arguments and the result of Transformers' `_assisted_decoding`."""
    check_prepared(target, kwargs["assistant_model"], input_ids, kwargs)
    return _decode(target, input_ids, kwargs)


def _decode(target: PreTrainedModel, input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> Any:
    unused = ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor", "synced_gpus")
    kept = {name: value for name, value in kwargs.items() if name not in unused}
    default = torch.get_default_device()
    host = torch.device("cpu")
    # Tensors that name no device are created on the host. Entering the context takes time, so it is skipped if the
    # default device is the host or the target's device.
    with nullcontext() if default in (host, input_ids.device) else host:
        return assisted_decoding(target, input_ids, drafter=kwargs["assistant_model"], **kept)


# --- with the default drafter -----------------------------------------------------------------------------------


def default_pair(
    target: Any, drafter: Any, memory: LookupMemory | None = None
) -> tuple[PreTrainedModel, DominoDraftModel]:
    """Return the model that generates inside `target`, and its drafter, after a check that they fit together.

    If there is a memory, it becomes the drafter's.
    """
    check_memory(memory, "memory")
    target = unwrapped(target)
    if not isinstance(target, GenerationMixin):
        remedy = "Pass the model itself, such as pipeline.model."
        raise invalid_argument("the target", "a model that generates", type(target).__name__, remedy)
    if isinstance(drafter, (str, os.PathLike)):
        drafter = _loaded(target, drafter)  # not the one that calls name, because its memory and weights may change
    drafter = fitting_drafter(drafter, target, "the default drafter")
    recognise(drafter.config, target)
    if memory is not None:
        drafter.memory = memory
    return target, drafter


def meet(target: PreTrainedModel, name: str, memory_file: str | None = None) -> None:
    """Attach the drafter called `name` to a target if it was made for this target, and log the outcome.

    With the name of a file, the drafter gets the memory in it.
    """
    try:
        if not is_recycling(name):
            check_recorded(drafter_config(name), target)
        memory = None
        if memory_file is not None:
            memory = _memory_in(memory_file)
        set_default(*default_pair(target, name, memory))
        notice(f"{name} drafts for {target.name_or_path}.")
    except ValueError as error:
        if invalid_field(error) is None:
            raise
        detach(target)
        notice(f"{target.name_or_path} generates without a drafter: {error}")


@functools.cache
def _memory_in(name: str) -> LookupMemory:
    """Return the memory in a file, or a new one if there is no file yet; it is saved when the process ends."""
    memory = LookupMemory()
    if Path(name).exists():
        memory = LookupMemory.load(name)
    atexit.register(memory.save, name)
    return memory


def count_mode(default: Attached, mode: GenerationMode) -> None:
    """Count a call as plain if its mode, such as beam search, never asks for a drafter."""
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION):
        default.count(mode.value, f"{mode.value} cannot be drafted.")


def decode_by_default(
    default: Attached, original: Callable, target: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Decode a prepared call with the default drafter, or with the original method if it cannot be drafted."""
    config = kwargs.get("generation_config")
    # `generate` passes everything but the ids by keyword; otherwise, somebody drives this loop directly. With
    # `is_assistant`, the target is itself drafting for another model.
    if args or config is None or getattr(config, "is_assistant", False):
        return original(target, input_ids, *args, **kwargs)
    drafted = kwargs | {"assistant_model": default.drafter}
    try:
        check_call(target, config.get_generation_mode(default.drafter), config, drafted)
        check_prepared(target, default.drafter, input_ids, kwargs)
    except ValueError as error:
        if (field := invalid_field(error)) is None:
            raise
        default.count(field, str(error))
        return original(target, input_ids, **kwargs)
    was_empty = not kwargs[CACHE].get_seq_length()
    try:
        output = _decode(target, input_ids, drafted)
    except ValueError as error:  # such as that of a hook that shortens the cache
        field = invalid_field(error)
        if field is None or not (may_restart(error) and was_empty):
            raise
        default.count(field, str(error))
        # Any other cache was not used, such as a static one or that of a batch, or the loop has put its states back.
        if unalignable(kwargs[CACHE]) is None:
            empty(kwargs[CACHE])
        return original(target, input_ids, **kwargs)
    default.count()
    stats = default.drafter.stats
    logger.info(stats.summary)
    if default.on_call is not None:
        default.on_call(getattr(output, "sequences", output), kwargs.get("attention_mask"), stats)
    return output


# --- with a drafter's name --------------------------------------------------------------------------------------


def check_names(model: Any, drafter: str | os.PathLike) -> None:
    """Raise an error for a wrong name, or a drafter in place of the target, before a pipeline loads anything."""
    if not is_recycling(drafter):
        check_source(os.fspath(drafter), "assistant_model", words=(RECYCLING,))
    if isinstance(model, (str, os.PathLike)):
        check_is_target(os.fspath(model), "model")


def pipeline_drafter(target: PreTrainedModel, assistant: Any, **download: Any) -> DominoDraftModel | None:
    """Return a pipeline's drafter, given as a model, path, Hub name or `"recycling"`; None for another model's name."""
    if not target.can_generate():
        return None
    if isinstance(assistant, (str, os.PathLike)):
        if (made := drafter_called(assistant, target)) is not None:
            return made
        check_source(os.fspath(assistant), "assistant_model", words=(RECYCLING,), **download)
        found = format_of(stored_config(assistant, download))
        if found in (None, MUSE_GLIMMER):  # Transformers runs these assistants itself
            return None
        drafter = DominoDraftModel.from_pretrained(assistant, dtype=target.dtype, **download)
        assistant = drafter.to(input_device(target))
    check_target(assistant.config, target)
    return assistant


def named(target: PreTrainedModel, name: Any, **download: Any) -> DominoDraftModel:
    """Return the drafter with a folder or Hub name, on the target's device and in its dtype, loaded once per target.

    It is loaded again, in place of the one before, when a file in the folder was replaced or the target has moved.
    """
    place = os.fspath(name)
    files: tuple = ()
    if Path(place).is_dir():
        place = os.path.abspath(place)
        files = trace_of_files(Path(place, download.get("subfolder") or ""))
    state = (files, target.dtype, input_device(target))
    key = (place, download.get("revision"), download.get("subfolder"))
    return drafter_named(target, key, state, lambda: _loaded(target, name, **download))


def _loaded(target: PreTrainedModel, name: str | os.PathLike, **download: Any) -> DominoDraftModel:
    """Load the drafter with a folder or Hub name, on the target's device and in its dtype."""
    found = pipeline_drafter(target, name, **download)
    if found is None:
        remedy = "Load a model of another kind first. `hf-domino find TARGET` lists drafters."
        raise invalid_argument("the name of a drafter", "that of a drafter", os.fspath(name), remedy)
    return found

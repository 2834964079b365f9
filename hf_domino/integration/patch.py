"""The one patch of Transformers: it lets `generate` and `pipeline` take a Domino drafter as `assistant_model`.

Why a patch: Transformers selects how to draft from a fixed list of private branches, and its pipelines accept an
assistant by path only if its class is part of Transformers. Four functions are wrapped, each looking only for our
drafter; every other call reaches the original with the arguments it came with. `uninstall` puts the originals back.
`attach` gives one target the same without touching any class, through Transformers' own assisted loop.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import transformers
from transformers import AutoConfig, AutoModel, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.pipelines import base as pipelines_base

from hf_domino.compatibility import check_is_loaded, check_rows, check_target
from hf_domino.configuration import DominoConfig
from hf_domino.decoding.caches.alignment import unalignable
from hf_domino.decoding.loop import assisted_decoding
from hf_domino.decoding.sampling import stateful_processors
from hf_domino.decoding.static.fixed_caches import unfixable
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drift.shadow import watched
from hf_domino.identity import recognise
from hf_domino.integration.call_checks import (
    check_batch,
    check_generation,
    check_inputs,
    check_native_loop,
    check_rope,
    check_static,
    check_step_outputs,
)
from hf_domino.integration.candidate_generator import DominoCandidateGenerator

_MARK = "_hf_domino"  # attribute of a wrapper: (the wrapper, the original)


def register_auto_classes() -> None:
    """Teach `AutoConfig` and `AutoModel` the model type `"domino"`. Calling it again changes nothing."""
    AutoConfig.register(DominoConfig.model_type, DominoConfig, exist_ok=True)
    AutoModel.register(DominoConfig, DominoDraftModel, exist_ok=True)


def _wrapper_of(original: Callable) -> Callable[[Callable], Callable]:
    """Like `functools.wraps`, which keeps the signature `generate` inspects, and remembers the original."""

    def decorate(wrapper: Callable) -> Callable:
        wrapper = functools.wraps(original)(wrapper)
        setattr(wrapper, _MARK, (wrapper, original))
        return wrapper

    return decorate


def _original_of(function: Callable | None) -> Callable | None:
    """What `function` wraps, if it is our own wrapper and not somebody's wrapper of ours (`wraps` copies marks)."""
    wrapper, original = getattr(function, _MARK, (None, None))
    return original if wrapper is function else None


def _wrap_validation(original: Callable) -> Callable:
    @_wrapper_of(original)
    def validate(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        check_is_loaded(assistant)
        drafter = _drafter_of(assistant)
        if drafter is not None:
            generation_mode_kwargs["assistant_model"] = drafter
            is_native = _runs_native_loop(self)
            check_generation(self, drafter, generation_config, generation_mode, is_native)
            recognise(drafter.config, self, generation_mode_kwargs.get("tokenizer"))
            # Transformers refuses a second tokenizer for equal vocabularies; a drafter has none of its own
            generation_mode_kwargs.pop("assistant_tokenizer", None)
            if not is_native:
                # Its own assisted loop takes neither several sequences at once nor recurrent states; ours does both
                generation_mode = GenerationMode.SAMPLE
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _wrap_decoding(original: Callable) -> Callable:
    @_wrapper_of(original)
    def decode(self, input_ids, *args, **kwargs):
        drafter = kwargs.get("assistant_model")
        if not isinstance(drafter, DominoDraftModel):
            return original(self, input_ids, *args, **kwargs)
        check_inputs(self, input_ids, kwargs)
        check_rope(self, drafter.config.num_draft_tokens, input_ids, kwargs, kwargs["generation_config"])
        check_step_outputs(self, len(input_ids), kwargs["generation_config"])
        unfixable_layer = unfixable(kwargs["past_key_values"])
        check_static(self, len(input_ids), kwargs, kwargs["generation_config"], unfixable_layer)
        stateful = stateful_processors(kwargs["logits_processor"])
        check_batch(len(input_ids), kwargs, stateful, unalignable(kwargs["past_key_values"]))
        check_rows(self, drafter.config.num_draft_tokens, len(input_ids), kwargs)
        unused = ("assistant_model", "assistant_tokenizer", "tokenizer", "inputs_tensor", "synced_gpus")
        kept = {name: value for name, value in kwargs.items() if name not in unused}
        return watched(assisted_decoding)(self, input_ids, *args, drafter=drafter, **kept)

    return decode


def _wrap_candidate_generator(original: Callable) -> Callable:
    @_wrapper_of(original)
    def get_candidate_generator(self, *args, **kwargs):
        drafter = kwargs.get("assistant_model")
        if not isinstance(drafter, DominoDraftModel):
            return original(self, *args, **kwargs)
        return _native_generator(self, drafter, **kwargs)

    return get_candidate_generator


def _wrap_pipeline_loading(original: Callable) -> Callable:
    @_wrapper_of(original)
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        drafter = _pipeline_drafter(model, assistant_model)
        if drafter is None:
            return original(model, assistant_model, assistant_tokenizer)
        return drafter, None

    return load_assistant_model


def _drafter_of(assistant: Any) -> DominoDraftModel | None:
    """The drafter that an assistant is, or that PEFT has put adapters into; None if it is not ours."""
    if not isinstance(assistant, PreTrainedModel) and hasattr(assistant, "peft_config"):
        assistant = assistant.get_base_model()
    return assistant if isinstance(assistant, DominoDraftModel) else None


def _runs_native_loop(target: PreTrainedModel) -> bool:
    """Whether Transformers' own assisted loop will decode: the target is attached and nothing is installed."""
    return not hasattr(type(target)._assisted_decoding, _MARK)


def _native_generator(
    target: PreTrainedModel, drafter: DominoDraftModel, *, input_ids, model_kwargs, **kwargs: Any
) -> DominoCandidateGenerator:
    config, processors = kwargs["generation_config"], kwargs["logits_processor"]
    check_native_loop(target, len(input_ids), config, model_kwargs, stateful_processors(processors))
    check_inputs(target, input_ids, model_kwargs)
    check_rope(target, drafter.config.num_draft_tokens, input_ids, model_kwargs, config)
    return DominoCandidateGenerator(drafter, target, config, processors)


def _pipeline_drafter(target: PreTrainedModel, assistant: Any) -> DominoDraftModel | None:
    """The drafter a pipeline was given, as an object or as a path or Hub name; None if it is not ours."""
    if not target.can_generate():
        return None
    if isinstance(assistant, (str, os.PathLike)):
        config, _ = PreTrainedConfig.get_config_dict(assistant)
        if config.get("model_type") != DominoConfig.model_type:
            return None
        assistant = DominoDraftModel.from_pretrained(assistant, dtype=target.dtype).to(target.device)
    drafter = _drafter_of(assistant)
    if drafter is not None:
        check_target(drafter.config, target)
    return drafter


_PATCHES: tuple[tuple[Any, str, Callable[[Callable], Callable]], ...] = (
    (GenerationMixin, "_validate_generation_mode", _wrap_validation),
    (GenerationMixin, "_assisted_decoding", _wrap_decoding),
    (GenerationMixin, "_get_candidate_generator", _wrap_candidate_generator),
    (pipelines_base, "load_assistant_model", _wrap_pipeline_loading),
)


def install() -> None:
    """Let every `generate` and `pipeline` take a [`DominoDraftModel`] as `assistant_model`.

    Importing `hf_domino` calls it, unless the environment variable `HF_DOMINO_NO_PATCH` is `1`. Calling it again
    changes nothing. If a later Transformers has renamed one of the functions, nothing is patched and a warning names
    it; [`attach`] remains.

    Example:
    ```python
    >>> import hf_domino
    >>> hf_domino.install()
    >>> hf_domino.is_installed()
    True

    ```
    """
    missing = [name for owner, name, _ in _PATCHES if not hasattr(owner, name)]
    if missing:
        warnings.warn(
            f"hf_domino needs {', '.join(missing)}, which transformers {transformers.__version__} does not have: "
            "nothing was patched. Use hf_domino.attach(target) before target.generate(..., assistant_model=drafter).",
            stacklevel=2,
        )
        return
    for owner, name, wrap in _PATCHES:
        current = getattr(owner, name)
        if _original_of(current) is not None or not hasattr(current, _MARK):
            setattr(owner, name, wrap(_original_of(current) or current))


def uninstall() -> None:
    """Put the original functions of Transformers back. Calling it again changes nothing.

    A function that something else has wrapped after us is left alone: the original underneath would undo that too.
    """
    for owner, name, _ in _PATCHES:
        original = _original_of(getattr(owner, name, None))
        if original is not None:
            setattr(owner, name, original)


def is_installed() -> bool:
    """Whether `generate` and `pipeline` currently take a [`DominoDraftModel`]."""
    return all(hasattr(getattr(owner, name, None), _MARK) for owner, name, _ in _PATCHES)


def attach(target: PreTrainedModel) -> None:
    """Let one target take a [`DominoDraftModel`] as `assistant_model`, without patching any class.

    Drafts then run in Transformers' own assisted loop: exact as ours, but it refuses stop strings and filled caches,
    and asks custom stopping criteria at the end of a round only; statistics are in `drafter.stats` alone. While
    [`install`] is in force our own loop is used instead. Copies stay attached; one that was pickled must be attached
    again. [`detach`] undoes it.

    Args:
        target (`PreTrainedModel`): A causal language model; two private methods are set on this instance.

    Raises:
        ValueError: If this version of Transformers does not have these methods.
    """
    names = ("_validate_generation_mode", "_get_candidate_generator")
    missing = [name for name in names if not hasattr(target, name)]
    if missing:
        raise ValueError(
            f"attach needs a target with {', '.join(names)}; {type(target).__name__} in transformers "
            f"{transformers.__version__} lacks {', '.join(missing)}. Use a supported version of transformers."
        )
    detach(target)
    for name, wrap in zip(names, (_wrap_validation, _wrap_candidate_generator), strict=True):
        original = getattr(target, name).__func__
        setattr(target, name, MethodType(wrap(_original_of(original) or original), target))


def detach(target: PreTrainedModel) -> None:
    """Undo [`attach`] on `target`. Calling it again changes nothing."""
    for name in ("_validate_generation_mode", "_get_candidate_generator"):
        if hasattr(target.__dict__.get(name), _MARK):
            delattr(target, name)

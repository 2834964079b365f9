"""The one patch of Transformers: it lets `generate` and `pipeline` take a Domino drafter as `assistant_model`.

Why a patch: Transformers selects how to draft from a fixed list of private branches, and its pipelines accept an
assistant by path only if its class is part of Transformers, and then load it without the token and the cache that they
were given. Six functions are wrapped, each looking only for our drafter; every other call reaches the original with the
arguments it came with. `uninstall` puts the originals back.
`attach` gives one target the same without touching any class, through Transformers' own assisted loop.

Nothing is imported for it: a module is patched when it is imported, and what a drafter needs comes with the first call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from hf_domino.integration.auto_classes import MODEL_TYPE
from hf_domino.integration.on_import import forget, is_awaited, when_imported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MARK = "_hf_domino"  # attribute of a wrapper: (the wrapper, the original)
# What a pipeline was given for downloads and is as good for the drafter's; a revision is one repository's.
_FOR_ALL_REPOSITORIES = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
_downloads: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()  # of a pipeline's model, while it is made


def _assisted_call() -> Any:
    from hf_domino.integration import assisted_call

    return assisted_call


def _drafter_of(assistant: Any) -> Any:
    """The drafter that an assistant is; None if it is not ours."""
    from hf_domino.target.compatibility import drafter_of

    return drafter_of(assistant)


def _taken_download(model: Any) -> dict[str, Any] | None:
    """What a pipeline was given for downloads, once: a token is not kept for longer than it takes."""
    with contextlib.suppress(TypeError):
        return _downloads.pop(model, None)
    return None


def _is_name(assistant: Any) -> bool:
    return isinstance(assistant, (str, os.PathLike))


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
        drafter = _assisted_call().named(self, assistant) if _is_name(assistant) else _drafter_of(assistant)
        if drafter is not None:
            generation_mode_kwargs["assistant_model"] = drafter
            is_native = not hasattr(type(self)._assisted_decoding, _MARK)  # attached, and nothing is installed
            generation_mode = _assisted_call().check_call(
                self, generation_mode, generation_config, generation_mode_kwargs, is_native
            )
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _wrap_assisted(replacement: str) -> Callable[[Callable], Callable]:
    """Wraps a method that is told the assistant by name: with our drafter it is this function of ours."""

    def wrap(original: Callable) -> Callable:
        @_wrapper_of(original)
        def assisted(self, *args, **kwargs):
            is_ours = _drafter_of(kwargs.get("assistant_model")) is not None
            return (getattr(_assisted_call(), replacement) if is_ours else original)(self, *args, **kwargs)

        return assisted

    return wrap


def _wrap_pipeline_loading(original: Callable) -> Callable:
    @_wrapper_of(original)
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        drafter, download = _drafter_of(assistant_model), _taken_download(model)
        if drafter is not None or _is_name(assistant_model):
            given = assistant_model if drafter is None else drafter
            drafter = _assisted_call().pipeline_drafter(model, given, download)
        if drafter is None:
            return original(model, assistant_model, assistant_tokenizer)
        return drafter, None

    return load_assistant_model


def _wrap_pipeline(original: Callable) -> Callable:
    @_wrapper_of(original)
    def pipeline(task=None, model=None, *args, **kwargs):
        if _is_name(kwargs.get("assistant_model")):
            _assisted_call().check_names(model, **kwargs)  # before anything is loaded
        return original(task, model, *args, **kwargs)

    return pipeline


def _wrap_model_loading(original: Callable) -> Callable:
    @_wrapper_of(original)
    def load_model(model, config, *args, **kwargs):
        if _is_name(model) and getattr(config, "model_type", None) == MODEL_TYPE:
            _assisted_call().refuse_drafter(model)
        loaded = original(model, config, *args, **kwargs)
        download = {name: kwargs[name] for name in _FOR_ALL_REPOSITORIES if kwargs.get(name) is not None}
        with contextlib.suppress(TypeError):  # what cannot be a key is no target of ours
            _downloads[loaded] = download
        return loaded

    return load_model


# Module of Transformers -> function -> (class that has it, or None for the module itself; what wraps it).
_PATCHES: dict[str, dict[str, tuple[str | None, Callable[[Callable], Callable]]]] = {
    "transformers.generation.utils": {
        "_validate_generation_mode": ("GenerationMixin", _wrap_validation),
        "_assisted_decoding": ("GenerationMixin", _wrap_assisted("decode")),
        "_get_candidate_generator": ("GenerationMixin", _wrap_assisted("candidate_generator")),
    },
    "transformers.pipelines.base": {"load_assistant_model": (None, _wrap_pipeline_loading)},
    "transformers.pipelines": {"pipeline": (None, _wrap_pipeline), "load_model": (None, _wrap_model_loading)},
}
_ATTACHED = ("_validate_generation_mode", "_get_candidate_generator")  # what `attach` wraps, on one target


def _owner(module: ModuleType, class_name: str | None) -> Any:
    return getattr(module, class_name, None) if class_name else module


def _patch(module: ModuleType) -> None:
    """Wrap the functions of one module, or none of them if one is missing."""
    wraps = {name: (_owner(module, class_name), wrap) for name, (class_name, wrap) in _PATCHES[module.__name__].items()}
    missing = [name for name, (owner, _) in wraps.items() if not hasattr(owner, name)]
    if missing:
        warnings.warn(
            f"hf_domino needs {', '.join(missing)}, which {module.__name__} of transformers {_version()} does not "
            "have: it was not patched. Use hf_domino.attach(target) before "
            "target.generate(..., assistant_model=drafter).",
            stacklevel=2,
        )
        return
    for name, (owner, wrap) in wraps.items():
        current = getattr(owner, name)
        if _original_of(current) is not None or not hasattr(current, _MARK):
            _put(owner, name, wrap(_original_of(current) or current))


def _put(owner: Any, name: str, function: Callable) -> None:
    package = sys.modules["transformers"]
    if vars(package).get(name) is getattr(owner, name):  # it keeps what it was once asked for
        setattr(package, name, function)
    setattr(owner, name, function)


def _version() -> str:
    return sys.modules["transformers"].__version__


def install() -> None:
    """Let every `generate` and `pipeline` take a [`DominoDraftModel`] as `assistant_model`.

    Importing `hf_domino` calls it, unless the environment variable `HF_DOMINO_NO_PATCH` is `1`. Calling it again
    changes nothing. If a later Transformers has renamed one of the functions, those beside it are not patched and a
    warning names it; [`attach`] remains.

    Example:
    ```python
    >>> import hf_domino
    >>> hf_domino.install()
    >>> hf_domino.is_installed()
    True

    ```
    """
    for name in _PATCHES:
        when_imported(name, _patch)


def uninstall() -> None:
    """Put the original functions of Transformers back. Calling it again changes nothing.

    A function that something else has wrapped after us is left alone: the original underneath would undo that too.
    """
    for module_name, wraps in _PATCHES.items():
        forget(module_name, _patch)
        for name, (class_name, _) in wraps.items() if module_name in sys.modules else ():
            owner = _owner(sys.modules[module_name], class_name)
            original = _original_of(getattr(owner, name, None))
            if original is not None:
                _put(owner, name, original)


def is_installed() -> bool:
    """Whether `generate` and `pipeline` take a [`DominoDraftModel`], or will as soon as they are imported."""
    return all(is_awaited(name, _patch) or name in sys.modules for name in _PATCHES) and all(
        hasattr(getattr(_owner(sys.modules[module_name], class_name), name, None), _MARK)
        for module_name, wraps in _PATCHES.items()
        if module_name in sys.modules
        for name, (class_name, _) in wraps.items()
    )


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
    missing = [name for name in _ATTACHED if not hasattr(target, name)]
    if missing:
        raise ValueError(
            f"attach needs a target with {', '.join(_ATTACHED)}; {type(target).__name__} in transformers "
            f"{_version()} lacks {', '.join(missing)}. Use a supported version of transformers."
        )
    detach(target)
    for name in _ATTACHED:
        _, wrap = _PATCHES["transformers.generation.utils"][name]
        original = getattr(target, name).__func__
        setattr(target, name, MethodType(wrap(_original_of(original) or original), target))


def detach(target: PreTrainedModel) -> None:
    """Undo [`attach`] on `target`. Calling it again changes nothing."""
    for name in _ATTACHED:
        if hasattr(target.__dict__.get(name), _MARK):
            delattr(target, name)

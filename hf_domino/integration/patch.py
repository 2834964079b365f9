"""The one patch of Transformers: it lets `generate` and `pipeline` take a Domino drafter as `assistant_model`.

Why a patch: Transformers selects how to draft from a fixed list of private branches, and its pipelines accept an
assistant by path only if its class is part of Transformers, and look for it only once the target is loaded. Five
functions are wrapped, each looking only for our drafter, the call's own or the target's default one; every other call
reaches the original with the arguments it came with. `uninstall` puts the originals back.

Nothing is imported for it: a module is patched when it is imported, and what a drafter needs comes with the first call.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_domino._common.errors import invalid_argument
from hf_domino.integration.default_drafter import default_of, set_default
from hf_domino.integration.on_import import forget, is_awaited, when_imported

if TYPE_CHECKING:
    from hf_domino.methods import DominoDraftModel

_MARK = "_hf_domino"  # attribute of a wrapper: (the wrapper, the original)


def _assisted_call() -> Any:
    from hf_domino.integration import assisted_call

    return assisted_call


def _drafter_of(assistant: Any) -> Any:
    """The drafter that an assistant is; None if it is not ours."""
    from hf_domino.target.compatibility import drafter_of

    return drafter_of(assistant)


def _is_name(assistant: Any) -> bool:
    return isinstance(assistant, (str, os.PathLike))


def _wrapped(original: Callable, wrap: Callable[[Callable], Callable]) -> Callable:
    """Wrap a function, with the signature that `generate` inspects, and remember the original."""
    wrapper = functools.wraps(original)(wrap(original))
    setattr(wrapper, _MARK, (wrapper, original))
    return wrapper


def _original_of(function: Callable | None) -> Callable | None:
    """The function inside `function`, if that is our own wrapper; somebody's wrapper of ours has its mark, too."""
    wrapper, original = getattr(function, _MARK, (None, None))
    return original if wrapper is function else None


def _wrap_validation(original: Callable) -> Callable:
    def validate(self, generation_mode, generation_config, generation_mode_kwargs):
        assistant = generation_mode_kwargs.get("assistant_model")
        if _is_name(assistant):
            drafter = _assisted_call().named(self, assistant)
        else:
            drafter = _drafter_of(assistant)
        if drafter is not None:
            generation_mode_kwargs["assistant_model"] = drafter
            generation_mode = _assisted_call().check_call(
                self, generation_mode, generation_config, generation_mode_kwargs
            )
        elif assistant is None and (default := default_of(self)) is not None:
            _assisted_call().count_mode(default, generation_mode)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _wrap_decoding(original: Callable) -> Callable:
    def decoding(self, *args, **kwargs):
        assistant = kwargs.get("assistant_model")
        if assistant is None and (default := default_of(self)) is not None:
            return _assisted_call().decode_by_default(default, original, self, *args, **kwargs)
        if _drafter_of(assistant) is None:
            return original(self, *args, **kwargs)
        return _assisted_call().decode(self, *args, **kwargs)

    return decoding


def _wrap_pipeline_loading(original: Callable) -> Callable:
    def load_assistant_model(model, assistant_model, assistant_tokenizer):
        drafter = _drafter_of(assistant_model)
        if drafter is not None or _is_name(assistant_model):
            drafter = _assisted_call().pipeline_drafter(model, drafter or assistant_model)
        if drafter is None:
            return original(model, assistant_model, assistant_tokenizer)
        return drafter, None

    return load_assistant_model


def _wrap_pipeline(original: Callable) -> Callable:
    def pipeline(task=None, model=None, *args, **kwargs):
        drafter = kwargs.get("assistant_model")
        if _is_name(drafter) and is_installed():  # the package may keep this wrapper
            _assisted_call().check_names(model, drafter)
        return original(task, model, *args, **kwargs)

    return pipeline


# Module of Transformers -> function -> (class that has it, or None for the module itself; its wrapper).
_PATCHES: dict[str, dict[str, tuple[str | None, Callable[[Callable], Callable]]]] = {
    "transformers.generation.utils": {
        "_validate_generation_mode": ("GenerationMixin", _wrap_validation),
        "_assisted_decoding": ("GenerationMixin", _wrap_decoding),
        "_sample": ("GenerationMixin", _wrap_decoding),
    },
    "transformers.pipelines.base": {"load_assistant_model": (None, _wrap_pipeline_loading)},
    "transformers.pipelines": {"pipeline": (None, _wrap_pipeline)},
}


def _owner(module: ModuleType, class_name: str | None) -> Any:
    if class_name:
        return getattr(module, class_name, None)
    return module


def _patch(module: ModuleType) -> None:
    """Wrap the functions of one module, or none of them if one is missing."""
    wraps = {name: (_owner(module, class_name), wrap) for name, (class_name, wrap) in _PATCHES[module.__name__].items()}
    missing = [name for name, (owner, _) in wraps.items() if not hasattr(owner, name)]
    if missing:
        version = sys.modules["transformers"].__version__
        warnings.warn(
            f"hf_domino needs {', '.join(missing)}, which {module.__name__} of transformers {version} does not "
            "have: it was not patched. Use another version, or drafter.save_pretrained(folder, standalone=True) and "
            "target.generate(..., custom_generate=folder, trust_remote_code=True), which need no patch.",
            stacklevel=2,
        )
        return
    for name, (owner, wrap) in wraps.items():
        current = getattr(owner, name)
        if _original_of(current) is not None or not hasattr(current, _MARK):
            setattr(owner, name, _wrapped(_original_of(current) or current, wrap))


def install() -> None:
    """Let every `generate` and `pipeline` take a [`DominoDraftModel`] as `assistant_model`.

    Importing `hf_domino` calls it, unless the environment variable `HF_DOMINO_NO_PATCH` is `1`. Calling it again
    changes nothing. If a later Transformers has renamed one of the functions, those beside it are not patched and a
    warning names it.

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
    for module_name in _PATCHES:
        forget(module_name, _patch)
    for owner, name in _imported():
        original = _original_of(getattr(owner, name, None))
        if original is not None:
            setattr(owner, name, original)


def is_installed() -> bool:
    """Whether `generate` and `pipeline` take a [`DominoDraftModel`], or will as soon as they are imported."""
    are_coming = all(is_awaited(name, _patch) or name in sys.modules for name in _PATCHES)
    return are_coming and all(hasattr(getattr(owner, name, None), _MARK) for owner, name in _imported())


def _imported() -> Iterator[tuple[Any, str]]:
    """The functions to wrap that are there already: what has each of them, and its name."""
    for module_name, wraps in _PATCHES.items():
        if module_name in sys.modules:
            for name, (class_name, _) in wraps.items():
                yield _owner(sys.modules[module_name], class_name), name


def attach(target: Any, drafter: DominoDraftModel | str | os.PathLike) -> None:
    """Give a target a default drafter: every plain `generate` of it drafts from now on, whoever calls it.

    Texts, generator and streamers stay what they are without. A call is plain that names another `assistant_model`,
    sets `num_assistant_tokens=0` or runs inside [`plain`], and one that cannot be drafted, such as beam search;
    [`attached`] counts these. Copies of the target have no default drafter. A second call replaces the first one's
    drafter, and [`detach`] takes it away.

    Args:
        target (`PreTrainedModel`): A causal language model, also one inside PEFT's or `torch.compile`'s.
        drafter ([`DominoDraftModel`], `str` or `Path`): The drafter, or its folder or Hub name.

    Raises:
        ValueError: If the drafter does not fit the target, or the patch is not installed.

    Example:
    ```python
    >>> import hf_domino, torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... ))
    >>> config = hf_domino.DominoConfig.for_target(target.config, num_hidden_layers=1, block_size=4, mask_token_id=3)
    >>> hf_domino.attach(target, hf_domino.DominoDraftModel(config))
    >>> _ = target.generate(torch.tensor([[5, 9, 33]]), max_new_tokens=8)
    >>> _ = target.generate(torch.tensor([[5, 9, 33]]), max_new_tokens=8, num_beams=2)
    >>> hf_domino.attached(target).num_drafted, hf_domino.attached(target).num_plain
    (1, {'beam_search': 1})
    >>> hf_domino.detach(target)

    ```
    """
    if not is_installed():
        raise invalid_argument(
            "the patch", "installed for a default drafter", "uninstalled", "Call hf_domino.install() first."
        )
    set_default(*_assisted_call().default_pair(target, drafter))

"""The only patch of Transformers: it lets `generate` and `pipeline` accept a Domino drafter as `assistant_model`.

A patch is needed because Transformers selects how to draft from a fixed list of private branches. Its pipelines accept
the path of an assistant only if the assistant's class is part of Transformers, and they look for the assistant only
after they have loaded the target. The patch wraps five functions. Each wrapper only looks for our drafter, either the
call's own or the target's default drafter; every other call reaches the original function with unchanged arguments.
`uninstall` restores the originals.

The patch imports nothing: a module is patched when it is imported, and what a drafter needs is imported when a call
first needs it.
"""

from __future__ import annotations

import functools
import inspect
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
    from hf_domino.decoding.lookup_memory import LookupMemory
    from hf_domino.methods import DominoDraftModel

_MARK = "_hf_domino"  # attribute of a wrapper: (the wrapper, the original)


def _assisted_call() -> Any:
    from hf_domino.integration import assisted_call

    return assisted_call


def _drafter_of(assistant: Any) -> Any:
    """Return the drafter that an assistant is or wraps; None if it is not one of ours."""
    from hf_domino.targets.compatibility import drafter_of

    return drafter_of(assistant)


def _is_name(assistant: Any) -> bool:
    return isinstance(assistant, (str, os.PathLike))


def _wrapped(original: Callable, wrap: Callable[[Callable], Callable]) -> Callable:
    """Wrap a function, keep its signature, which `generate` inspects, and remember the original."""
    wrapper = functools.wraps(original)(wrap(original))
    setattr(wrapper, _MARK, (wrapper, original))
    return wrapper


def _original_of(function: Callable | None) -> Callable | None:
    """Return the original inside our own wrapper; None for any other function."""
    # The mark alone is no proof: `functools.wraps` copies it to somebody else's wrapper around ours.
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
            # Transformers would take a drafter with another vocab_size, such as without padding, for another tokenizer.
            others = {name: value for name, value in generation_mode_kwargs.items() if name != "assistant_model"}
            return original(self, generation_mode, generation_config, others)
        if assistant is None and (default := default_of(self)) is not None:
            _assisted_call().count_mode(default, generation_mode)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _wrap_decoding(original: Callable) -> Callable:
    names = list(inspect.signature(original).parameters)[1:]

    def decoding(self, *args, **kwargs):
        by_name = dict(zip(names, args, strict=False)) | kwargs
        assistant = by_name.get("assistant_model")
        if assistant is None and (default := default_of(self)) is not None:
            return _assisted_call().decode_by_default(default, original, self, *args, **kwargs)
        if _drafter_of(assistant) is None:
            return original(self, *args, **kwargs)
        return _assisted_call().decode(self, **by_name)

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
        if _is_name(drafter) and is_installed():  # `transformers` itself may keep this wrapper after `uninstall`
            _assisted_call().check_names(model, drafter)
        return original(task, model, *args, **kwargs)

    return pipeline


# Module of Transformers -> function -> (class that has it, or None for the module itself; what wraps it).
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
            "have: it was not patched. Use another version, or drafter.save_pretrained(folder, custom_generate=True) "
            "and target.generate(..., custom_generate=folder, trust_remote_code=True), which need no patch.",
            stacklevel=2,
        )
        return
    for name, (owner, wrap) in wraps.items():
        current = getattr(owner, name)
        if _original_of(current) is not None or not hasattr(current, _MARK):
            setattr(owner, name, _wrapped(_original_of(current) or current, wrap))


def install() -> None:
    """Let every `generate` and `pipeline` accept a [`DominoDraftModel`] as `assistant_model`.

    Importing `hf_domino` calls this function, unless the environment variable `HF_DOMINO_NO_PATCH` is `1`. Calling it
    again changes nothing. If another version of Transformers lacks one of the functions, a warning names it, and the
    module that should have it is not patched.

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
    """Restore the original functions of Transformers. Calling it again changes nothing.

    A function that other code has wrapped after us is left alone, because restoring the original would remove that
    wrapper, too.
    """
    for module_name in _PATCHES:
        forget(module_name, _patch)
    for owner, name in _imported():
        original = _original_of(getattr(owner, name, None))
        if original is not None:
            setattr(owner, name, original)


def is_installed() -> bool:
    """Return whether `generate` and `pipeline` accept a [`DominoDraftModel`], or will as soon as they are imported."""
    are_coming = all(is_awaited(name, _patch) or name in sys.modules for name in _PATCHES)
    return are_coming and all(hasattr(getattr(owner, name, None), _MARK) for owner, name in _imported())


def _imported() -> Iterator[tuple[Any, str]]:
    """Yield the owner and the name of each function to wrap whose module has been imported."""
    for module_name, wraps in _PATCHES.items():
        if module_name in sys.modules:
            for name, (class_name, _) in wraps.items():
                yield _owner(sys.modules[module_name], class_name), name


def attach(target: Any, drafter: DominoDraftModel | str | os.PathLike, memory: LookupMemory | None = None) -> None:
    """Give a target a default drafter: from now on, its `generate` calls draft with it, whoever makes them.

    Texts, random generators and streamers behave as they do without a drafter. The default drafter is not used by calls
    that pass another `assistant_model`, set `num_assistant_tokens=0` or run inside [`plain`], nor by calls that cannot
    be drafted, such as beam search; [`attached`] counts how many calls drafted and how many could not. Copies of the
    target have no default drafter. Calling `attach` again replaces the drafter, and [`detach`] removes it.

    Args:
        target (`PreTrainedModel`): A causal language model, which PEFT or `torch.compile` may have wrapped.
        drafter ([`DominoDraftModel`], `str` or `Path`): The drafter, or its folder or Hub name, from which one is
            loaded that nothing else uses.
        memory ([`LookupMemory`], *optional*): Sets the `memory` of the drafter: calls then also use prompt lookup, and
            read the texts of earlier calls. By default, the drafter keeps the one that it has, usually none.

    Raises:
        ValueError: If the drafter does not fit the target, the patch is not installed, or `memory` is something else.

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
    set_default(*_assisted_call().default_pair(target, drafter, memory))

"""What is compared: every way to generate, as the arguments it adds to a call of `generate`.

To compare another one, such as a drafter in a second configuration, add a line to `METHODS`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers.cache_utils import DynamicLayer

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.untrained import lookahead, recycling
from hf_domino.evaluation.benchmark.lean import lean_decoding
from hf_domino.evaluation.benchmark.native_dflash import NativeDFlash, has_native_dflash
from hf_domino.pair import Pair

Arguments = dict[str, Any]


class Unavailable(Exception):
    """A method cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Method:
    """One way to generate.

    Args:
        label (`str`): Name in tables, Markdown.
        arguments (`Callable`): From the models and the flags of `hf-domino bench`, what to add to `generate`. Raises
            [`Unavailable`] where it cannot be measured.
        option (`str`, *optional*): Flag without which it is not measured.
        keeps_seed (`bool`): Whether it promises plain generation's sampled text from the same seed, too.
    """

    label: str
    arguments: Callable[[Pair, argparse.Namespace], Arguments]
    option: str | None = None
    keeps_seed: bool = False


def _prompt_lookup(pair: Pair, options: argparse.Namespace) -> Arguments:
    _check_single(options)
    return {"prompt_lookup_num_tokens": options.lookup_tokens}


def _assistant(pair: Pair, options: argparse.Namespace) -> Arguments:
    _check_single(options)
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (pair.target, pair.assistant)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"--assistant must have the target's vocabulary of {sizes[0]} tokens, got {sizes[1]}: take a smaller model "
            "of the same family."
        )
    return {"assistant_model": pair.assistant}


def _early_exit(pair: Pair, options: argparse.Namespace) -> Arguments:
    _check_single(options)
    last = pair.target.config.get_text_config(decoder=True).num_hidden_layers - 1
    if not 1 <= options.early_exit <= last:
        raise ValueError(f"--early-exit must be in [1, {last}] for this target, got {options.early_exit}.")
    try:
        DynamicLayer().crop(-1)
    except TypeError:
        # It would stop half way and leave the target with fewer layers.
        raise Unavailable(f"transformers {transformers.__version__} cannot exit early; a newer one can") from None
    return {"assistant_early_exit": options.early_exit}


def _native_dflash(pair: Pair, options: argparse.Namespace) -> Arguments:
    if not has_native_dflash():
        raise Unavailable(f"transformers {transformers.__version__} has no DFlash loop")
    _check_single(options)
    return {"assistant_model": NativeDFlash(_twin(pair)), "speculation_type": "dflash"}


def _check_single(options: argparse.Namespace) -> None:
    if options.batch_size > 1:
        raise Unavailable("Transformers decodes it one sequence at a time")


def _twin(pair: Pair) -> DominoDraftModel:
    if pair.twin is None:
        raise Unavailable("there is no DFlash twin")
    return pair.twin


def _domino(pair: Pair) -> DominoDraftModel:
    if pair.drafter.config.projector_type != "domino":
        raise Unavailable(f"the drafter is of another kind: {pair.drafter.config.kind.title}")
    return pair.drafter


def _with_lookup(pair: Pair, options: argparse.Namespace) -> Arguments:
    return _drafted(_domino(pair), "adaptive") | {"prompt_lookup_num_tokens": options.lookup_tokens}


def _drafted(drafter: DominoDraftModel, draft_length: str, **changes: Any) -> Arguments:
    return {"assistant_model": drafter.view(draft_length=draft_length, **changes)}


def _whole_blocks(drafter: DominoDraftModel) -> Arguments:
    return _drafted(drafter, "full", draft_tree_size=None)


def _in_shape(pair: Pair, tree_size: int | None) -> Arguments:
    return _drafted(_domino(pair), "adaptive", draft_tree_size=tree_size)


METHODS: dict[str, Method] = {
    "plain": Method("plain `generate`", lambda pair, options: {}, keeps_seed=True),
    "lean": Method("plain, lean loop", lambda pair, options: {"custom_generate": lean_decoding}, keeps_seed=True),
    "prompt_lookup": Method("prompt lookup", _prompt_lookup),
    "recycling": Method(
        "token recycling", lambda pair, options: {"assistant_model": recycling(pair.target)}, keeps_seed=True
    ),
    "lookahead": Method(
        "lookahead", lambda pair, options: {"assistant_model": lookahead(pair.target)}, keeps_seed=True
    ),
    "assistant": Method("small assistant", _assistant, option="assistant"),
    "early_exit": Method("early exit", _early_exit, option="early_exit"),
    "native_dflash": Method("DFlash twin, Transformers' loop", _native_dflash),
    "dflash": Method("DFlash twin, whole blocks", lambda pair, options: _whole_blocks(_twin(pair)), keeps_seed=True),
    "dflash_adaptive": Method("DFlash twin", lambda pair, options: _drafted(_twin(pair), "adaptive"), keeps_seed=True),
    "domino": Method("Domino, whole blocks", lambda pair, options: _whole_blocks(_domino(pair)), keeps_seed=True),
    "domino_adaptive": Method("**Domino**", lambda pair, options: _drafted(_domino(pair), "adaptive"), keeps_seed=True),
    "domino_lookup": Method("**Domino with prompt lookup**", _with_lookup, keeps_seed=True),
    "domino_chain": Method("Domino, chains", lambda pair, options: _in_shape(pair, None), "tree_size", keeps_seed=True),
    "domino_tree": Method(
        "Domino, trees", lambda pair, options: _in_shape(pair, options.tree_size), "tree_size", keeps_seed=True
    ),
}
BASELINE, FLOOR, COPIES = "plain", "lean", "prompt_lookup"
DEFAULT = BASELINE, COPIES, "domino_adaptive", "domino_lookup"  # and what a flag asks for
ALL = "all"
COMPARED = "domino_tree", "domino_chain"  # the same drafter in two ways, of which the first is to be faster


def keeps_seed(method: str) -> bool:
    """Whether a method promises plain generation's sampled text from the same seed; each drafter by itself does."""
    return method not in METHODS or METHODS[method].keeps_seed


def needs_drafter(methods: Sequence[str] | None) -> bool:
    """Whether any of these methods, or of those where none is named, runs the pair's drafter."""
    return any(name == ALL or name.startswith("domino") for name in methods or DEFAULT)


def choose_methods(pair: Pair, options: argparse.Namespace) -> tuple[dict[str, Arguments], dict[str, str]]:
    """What to measure, and what cannot be. Drafters that are compared are methods by themselves.

    Returns:
        `tuple[dict, dict]`: Method to arguments of `generate`, plain generation first; and method to why not.

    Raises:
        ValueError: If `--methods` names one that is unknown or that needs another flag.
    """
    chosen: dict[str, Arguments] = {}
    skipped: dict[str, str] = {}
    for name in _wanted(options, bool(pair.compared)):
        try:
            chosen[name] = METHODS[name].arguments(pair, options)
        except Unavailable as reason:
            skipped[name] = str(reason)
    return chosen | _compared(pair, options.tree_size), skipped


def _compared(pair: Pair, tree_size: int | None) -> dict[str, Arguments]:
    """The drafters that are compared, as they are; or, where a size of trees is given, with chains and with trees."""
    if tree_size is None:
        return {name: {"assistant_model": drafter} for name, drafter in pair.compared.items()}
    return {
        f"{name}, {shape}": {"assistant_model": drafter.view(draft_tree_size=size)}
        for name, drafter in pair.compared.items()
        for shape, size in (("chains", None), ("trees", tree_size))
    }


def _wanted(options: argparse.Namespace, compares: bool) -> Iterable[str]:
    without_flag = {name: method.option for name, method in METHODS.items() if _lacks(options, method.option)}
    if options.methods is None and compares:
        return [BASELINE, COPIES]
    if options.methods is None:
        asked = {name for name, method in METHODS.items() if method.option} - without_flag.keys()
        return [name for name in METHODS if name in {*DEFAULT, *asked, *["dflash_adaptive"] * bool(options.twin)}]
    if options.methods == [ALL]:
        return [name for name in METHODS if name not in without_flag]
    for name in options.methods:
        if name not in METHODS:
            raise ValueError(f"--methods must be {ALL} or name some of {', '.join(METHODS)}, got {name!r}.")
        if name in without_flag:
            flag = str(without_flag[name]).replace("_", "-")
            raise ValueError(f"--methods {name} needs --{flag}: give it, or leave {name} out.")
    return [name for name in METHODS if name in {BASELINE, *options.methods}]


def _lacks(options: argparse.Namespace, option: str | None) -> bool:
    return option is not None and getattr(options, option) is None


def models_of(pair: Pair, arguments: Arguments) -> list[nn.Module]:
    """The models that a method runs."""
    return [pair.target, *(value for value in arguments.values() if isinstance(value, nn.Module))]

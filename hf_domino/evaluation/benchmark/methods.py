"""The arguments that each method of a benchmark adds to a call of `generate`."""

from __future__ import annotations

from typing import Any

import torch

from hf_domino._common.refusal import refusal
from hf_domino.evaluation.benchmark.options import COPIES, TRANSFORMERS_OWN, WITH_COPIES, BenchOptions
from hf_domino.methods import DominoDraftModel, recycling
from hf_domino.pair import Pair

Arguments = dict[str, Any]


def choose_methods(pair: Pair, options: BenchOptions) -> tuple[dict[str, Arguments], dict[str, str]]:
    """Give the arguments of `generate` of each method, plain generation first, and why others cannot be measured."""
    # A Domino drafter alone has methods of its own. Others are compared, and come last.
    is_alone = [drafter.config.projector_type for drafter in pair.drafters.values()] == ["domino"]
    compared = {} if is_alone else dict(pair.drafters)
    found = {name: _arguments(name, pair, options) for name in options.wanted(compares=bool(compared))}
    skipped = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    chosen = {name: arguments for name, arguments in found.items() if not isinstance(arguments, str)}
    shapes = dict[str, Arguments]({"": {}})
    if options.tree_size is not None:
        compared = compared or {"Domino": pair.drafter}
        shapes = {", chains": {"draft_tree_size": None}, ", trees": {"draft_tree_size": options.tree_size}}
    for name, drafter in compared.items():
        for shape, fields in shapes.items():
            chosen[f"{name}{shape}"] = {"assistant_model": drafter.view(**fields)}
    return chosen, skipped


def _arguments(name: str, pair: Pair, options: BenchOptions) -> Arguments | str:
    """The arguments of a method, or the reason why it cannot be measured here."""
    if name in TRANSFORMERS_OWN and options.batch_size > 1:
        return "Transformers decodes it one sequence at a time"
    if name == "mtp":
        return _mtp(pair.target)
    if name == "recycling":
        return {"assistant_model": recycling(pair.target)}
    if name == "assistant":
        _check_assistant(pair)
        return {"assistant_model": pair.assistant}
    copies: Arguments = {"prompt_lookup_num_tokens": options.lookup_tokens} if name in (COPIES, WITH_COPIES) else {}
    if not name.startswith("domino"):
        return copies
    if (kind := pair.drafter.config.title) != "Domino":
        return f"the drafter is of another kind: {kind}"
    # Whole blocks, or as far as it pays.
    how = {"draft_length": "full", "draft_tree_size": None} if name == "domino" else {"draft_length": "adaptive"}
    return copies | {"assistant_model": pair.drafter.view(**how)}


def _mtp(target: Any) -> Arguments | str:
    """Transformers' own use of a target's MTP layers, which it reads from the target's files at each call."""
    if not getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None):
        return "the target has no such layers"
    call: Arguments = {"use_mtp": True}
    try:
        target.generate(torch.ones(1, 2, dtype=torch.long, device=target.device), max_new_tokens=2, **call)
    except Exception as error:  # what of it can be missing is not told in one way
        return " ".join(str(error).split())
    return call


def _check_assistant(pair: Pair) -> None:
    wanted, got = (model.config.get_text_config(decoder=True).vocab_size for model in (pair.target, pair.assistant))
    if wanted != got:
        remedy = "Take a smaller model of the same family."
        raise refusal("--assistant's vocabulary", f"the target's of {wanted} tokens", got, remedy)


def drafter_in(arguments: Arguments) -> DominoDraftModel | None:
    """The drafter of ours that a method runs, if any."""
    drafter = arguments.get("assistant_model")
    return drafter if isinstance(drafter, DominoDraftModel) else None

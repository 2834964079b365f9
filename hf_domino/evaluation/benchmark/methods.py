"""Choose the methods of a benchmark; a method is a set of arguments that it adds to a call of `generate`."""

from __future__ import annotations

from typing import Any

import torch

from hf_domino._common.errors import invalid_argument
from hf_domino.evaluation.benchmark.options import LOOKUP, PACKED, RECYCLED, TRANSFORMERS_OWN, WITH_LOOKUP, BenchOptions
from hf_domino.methods import DominoDraftModel, recycling
from hf_domino.pair import Pair

Arguments = dict[str, Any]


def choose_methods(pair: Pair, options: BenchOptions) -> tuple[dict[str, Arguments], dict[str, str]]:
    """Return the arguments of each method, plain generation first, and the reasons why others cannot be measured."""
    # A single Domino drafter is measured by several methods. All other drafters are one method each, and come last.
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
    """Return the arguments of a method, or the reason why it cannot be measured here."""
    if name in TRANSFORMERS_OWN and options.batch_size > 1:
        return "Transformers decodes it one sequence at a time"
    if name == PACKED and pair.target.device.type != "cpu":
        return "weights are only packed on a CPU"
    if name == "mtp":
        return _mtp(pair.target)
    if name == "assistant":
        wanted, got = (model.config.get_text_config(decoder=True).vocab_size for model in (pair.target, pair.assistant))
        if wanted != got:
            remedy = "Take a smaller model of the same family."
            raise invalid_argument("--assistant's vocabulary", f"the target's of {wanted} tokens", got, remedy)
        return {"assistant_model": pair.assistant}
    arguments: Arguments = {}
    if name in (LOOKUP, RECYCLED[1], WITH_LOOKUP):
        arguments["prompt_lookup_num_tokens"] = options.lookup_tokens
    if name in RECYCLED:
        arguments["assistant_model"] = recycling(pair.target)
    if not name.startswith("domino"):
        return arguments
    method = pair.drafter.config.title
    if method != "Domino":
        return f"the drafter's method is {method}"
    if name == "domino":
        view = pair.drafter.view(draft_length="full", draft_tree_size=None)
    else:
        view = pair.drafter.view(draft_length="adaptive")
    return arguments | {"assistant_model": view}


def _mtp(target: Any) -> Arguments | str:
    """Return the arguments with which Transformers uses MTP layers; it reads them from the target's files each time."""
    if not getattr(target.config.get_text_config(decoder=True), "num_mtp_layers", None):
        return "the target has no such layers"
    call: Arguments = {"use_mtp": True}
    try:
        target.generate(torch.ones(1, 2, dtype=torch.long, device=target.device), max_new_tokens=2, **call)
    except Exception as error:  # missing parts raise different errors
        return " ".join(str(error).split())
    return call


def drafter_in(arguments: Arguments) -> DominoDraftModel | None:
    """Return the drafter of hf_domino that a method runs, or None."""
    drafter = arguments.get("assistant_model")
    if isinstance(drafter, DominoDraftModel):
        return drafter
    return None

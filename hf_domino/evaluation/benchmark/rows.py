"""What the results of one benchmark share, and which of them an interrupted run has already."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_domino._common.errors import invalid_argument
from hf_domino.evaluation.benchmark.options import BenchOptions
from hf_domino.evaluation.benchmark.prompts import source
from hf_domino.evaluation.results import Result, measured, read_results
from hf_domino.pair import Pair
from hf_domino.targets.identity import check_same_models, commit_of

OF_OPTIONS = ("batch_size", "max_new_tokens", "repeats", "lookup_tokens", "tree_size", "dtype", "seed")
DATED = "date"  # can differ between the results of a run that was resumed
MODELS = "models"  # compared by weights and configurations, whatever their names are
REMEDY = "Write to another --results, or give --overwrite."


def settings_of(options: BenchOptions, pair: Pair, methods: Iterable[str]) -> dict[str, Any]:
    """Return the settings that all results of a run share, such as the identities of the models."""
    assistant = None
    if options.assistant is not None:
        assistant = Path(options.assistant).name
    drafter_commit = None
    if pair.drafter is not None:
        drafter_commit = commit_of(pair.drafter)
    return {
        "target": pair.name,
        "target_commit": commit_of(pair.target),
        "drafter_commit": drafter_commit,
        "assistant": assistant,
        "methods": list(methods),
        **({"columns": list(options.columns)} if options.columns else {}),
        **({"chat_template_kwargs": dict(pair.chat_template_kwargs)} if pair.chat_template_kwargs else {}),
        **{name: getattr(options, name) for name in OF_OPTIONS},
        "device": torch.device(options.device).type,
        "models": pair.models,
    }


def finished(
    path: Path,
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
    batches: Mapping[Any, Any],
    temperature: float,
) -> list[Result]:
    """Read the results of finished batches from an earlier run.

    Raises:
        ValueError: If the earlier run used other options, models, prompts, versions or another machine.
    """
    if not path.is_file():
        return []
    found: dict[Any, list[Result]] = {}  # by mode and prompt
    for result in measured(read_results(path, mend=True)):
        mode = result.get("mode")
        prompt = result.get("prompt")
        batch = (mode, prompt)
        expected = {
            **settings,
            **provenance,
            "sources": [source(each) for each in batches.get(batch, ())],
            "temperature": temperature if mode == "sample" else 0.0,
        }
        for name, value in expected.items():
            if name not in (DATED, MODELS) and result.get(name) != value:
                if name == "sources":
                    name = f"sources of {mode} batch {prompt}"
                there = f"as in {path}, {result.get(name)!r}"
                raise invalid_argument(name, there, value, REMEDY)
        check_same_models(result.get(MODELS), settings[MODELS], str(path), REMEDY)
        found.setdefault(batch, []).append(result)
    return [result for results in found.values() if len(results) == len(settings["methods"]) for result in results]

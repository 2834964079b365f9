"""Where the rows of a benchmark come from: its flags, and the machine, versions, commit and date."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from hf_domino.provenance import provenance

DATED = ("date",)  # may differ between rows of one run that was taken up again


def provenance_of_run(options: argparse.Namespace, pair_name: str, methods: Iterable[str]) -> dict[str, Any]:
    """Fields that every row of a run carries.

    Args:
        options (`argparse.Namespace`): Flags of `hf-domino bench`.
        pair_name (`str`): Name of the target.
        methods (`Iterable[str]`): What is measured, in turn.
    """
    return {
        "methods": list(methods),
        "batch_size": options.batch_size,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "lookup_tokens": options.lookup_tokens,
        "assistant": options.assistant and Path(options.assistant).name,
        "early_exit": options.early_exit,
        "dtype": options.dtype,
        "device": torch.device(options.device).type,
        "seed": options.seed,
        "pair": pair_name,
    } | provenance(options.device)

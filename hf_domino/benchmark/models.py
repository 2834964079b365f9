"""The models of a benchmark: a pair of folders side by side, or a target, drafter and twin named one by one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino.compatibility import check_target
from hf_domino.modeling import DominoDraftModel
from hf_domino.pair import DTYPES, Pair, dflash_folder, domino_folder, find_pair


def load_models(options: argparse.Namespace) -> Pair:
    """Load target, tokenizer, drafter, twin and assistant as the flags name them.

    Args:
        options (`argparse.Namespace`): Flags of `hf-domino bench`.

    Raises:
        ValueError: If a drafter cannot be found or does not fit the target.
    """
    if options.target and options.pair:
        raise ValueError("--target and --pair both name a target: give one of them.")
    target_name = options.target or str(find_pair(options.pair).resolve())
    drafter_name = options.drafter or _beside(domino_folder(Path(target_name)))
    if drafter_name is None:
        raise ValueError(f"--drafter must be given: there is no {domino_folder(Path(target_name))}.")
    twin_name = options.twin or _beside(dflash_folder(Path(target_name)))

    def load(model_class: Any, name: str) -> Any:
        model = model_class.from_pretrained(name, dtype=DTYPES[options.dtype], local_files_only=Path(name).is_dir())
        return model.to(torch.device(options.device)).eval()

    tokenizer = AutoTokenizer.from_pretrained(target_name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    pair = Pair(
        name=Path(target_name).name,
        folder=Path(target_name),
        target=load(AutoModelForCausalLM, target_name),
        tokenizer=tokenizer,
        drafter=load(DominoDraftModel, drafter_name),
        twin=None if twin_name is None else load(DominoDraftModel, twin_name),
        assistant=None if options.assistant is None else load(AutoModelForCausalLM, options.assistant),
    )
    for drafter in filter(None, (pair.drafter, pair.twin)):
        check_target(drafter.config, pair.target)
    return pair


def prompts_of(options: argparse.Namespace, pair: Pair) -> Path:
    """File of prompts: the one that was named, else the target's, else the bundled pair's."""
    own = pair.folder / "prompts.jsonl"
    if options.prompts or own.is_file():
        return options.prompts or own
    try:
        return find_pair() / "prompts.jsonl"
    except FileNotFoundError as error:
        raise ValueError(f"--prompts must be given: there is no {own}, and no bundled pair.") from error


def _beside(folder: Path) -> str | None:
    return str(folder) if (folder / "config.json").is_file() else None

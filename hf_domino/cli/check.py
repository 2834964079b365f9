"""`hf-domino check`: does a drafter fit its target; exit code 0 if it does, 1 if not."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import transformers

from hf_domino.check import MAX_NEW_TOKENS, check_fit
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.pair import DTYPES, PROMPTS, find_pair, load_pair, read_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino check`."""
    parser.add_argument("--target", help="folder or Hub name of the target (default: the bundled one)")
    parser.add_argument("--drafter", help="folder or Hub name of the drafter (default: NAME-domino beside the target)")
    parser.add_argument(
        "--prompts", type=Path, help="JSONL with `text` or `messages` (default: prompts.jsonl of the target, or own)"
    )
    parser.add_argument("--num-prompts", type=int, default=4, help="use the first N prompts of the file")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="tokens to generate per prompt")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="dtype of both models")
    parser.add_argument("--device", default="cpu", help="device of both models")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino check`; returns 1 if the drafter does not fit."""
    for flag in ("num_prompts", "max_new_tokens"):
        if getattr(options, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {getattr(options, flag)}.")
    transformers.utils.logging.disable_progress_bar()
    target = options.target or _bundled_target()
    prompts = _read_prompts(options.prompts or _prompts_of(target), options.num_prompts)
    pair = load_pair(target, options.drafter, dtype=DTYPES[options.dtype], device=options.device)
    result = check_fit(pair.drafter, pair.target, pair.tokenizer, prompts, options.max_new_tokens)
    print(f"target {target}\ndrafter {pair.drafter.config.name_or_path}\n\n{result}")
    return 0 if result.fits else FAILED_CHECK


def _bundled_target() -> str:
    try:
        return str(find_pair())
    except FileNotFoundError as error:
        raise ValueError("--target must be given: the bundled pair is not in this checkout or folder.") from error


def _prompts_of(target: str) -> Path | None:
    path = Path(target) / PROMPTS
    return path if path.is_file() else None


def _read_prompts(path: Path | None, count: int) -> list[Any] | None:
    """The first prompts of a file, each a text or a list of messages; None for the defaults."""
    if path is None:
        return None
    prompts = read_prompts(path)[:count]
    if not prompts:
        raise ValueError(f"--prompts must hold at least one prompt, got none in {path}.")
    return [prompt.get("messages", prompt.get("text")) for prompt in prompts]

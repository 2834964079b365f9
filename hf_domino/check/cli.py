"""`hf-domino check`: does a drafter fit its target; exit code 0 if it does, 1 if not, 2 if too little was measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino.check import MAX_NEW_TOKENS, check_fit
from hf_domino.check.verdict import DOES_NOT_FIT, FITS, TOO_FEW
from hf_domino.modeling import DominoDraftModel
from hf_domino.pair import DTYPES, domino_folder, find_pair

EXIT_CODES = {FITS: 0, DOES_NOT_FIT: 1, TOO_FEW: 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino check`."""
    parser.add_argument("--target", help="folder or Hub name of the target (default: the bundled one)")
    parser.add_argument("--drafter", help="folder or Hub name of the drafter (default: NAME-domino beside the target)")
    parser.add_argument(
        "--prompts", type=Path, help="JSONL with `text` or `messages` (default: prompts.jsonl of the target, or own)"
    )
    parser.add_argument("--num-prompts", type=int, default=12, help="use at most the first N prompts of the file")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS, help="tokens to generate per prompt")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="dtype of both models")
    parser.add_argument("--device", default="cpu", help="device of both models")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino check`; returns 1 if the drafter does not fit, 2 if too little was measured."""
    for flag in ("num_prompts", "max_new_tokens"):
        if getattr(options, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, got {getattr(options, flag)}.")
    target_name = options.target or _bundled_target()
    drafter_name = options.drafter or _drafter_beside(target_name)
    prompts = _read_prompts(options.prompts or _prompts_of(target_name), options.num_prompts)
    transformers.utils.logging.disable_progress_bar()
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    drafter = DominoDraftModel.from_pretrained(drafter_name, dtype=dtype).to(device).eval()
    target = AutoModelForCausalLM.from_pretrained(target_name, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_name)
    result = check_fit(drafter, target, tokenizer, prompts, options.max_new_tokens)
    print(f"target {target_name}\ndrafter {drafter_name}\n\n{result}")
    return EXIT_CODES[result.verdict]


def _bundled_target() -> str:
    try:
        return str(find_pair())
    except FileNotFoundError as error:
        raise ValueError("--target must be given: the bundled pair is not in this checkout or folder.") from error


def _drafter_beside(target_name: str) -> str:
    folder = domino_folder(Path(target_name))
    if not (folder / "config.json").is_file():
        raise ValueError(f"--drafter must be given: there is no {folder} beside --target {target_name}.")
    return str(folder)


def _prompts_of(target_name: str) -> Path | None:
    path = Path(target_name) / "prompts.jsonl"
    return path if path.is_file() else None


def _read_prompts(path: Path | None, count: int) -> list[Any] | None:
    """The first prompts of a file, each a text or a list of messages; None for the defaults."""
    if path is None:
        return None
    prompts: list[Any] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if len(prompts) < count and line.strip():
            prompts.append(_prompt_of(line, f"{path}, line {number}"))
    if not prompts:
        raise ValueError(f"--prompts must hold at least one prompt, got none in {path}.")
    return prompts


def _prompt_of(line: str, place: str) -> Any:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: expected a JSON object, got {line[:60]!r} ({error}).") from error
    row = row if isinstance(row, dict) else {}
    for field, kind in (("messages", list), ("text", str), ("prompt", str)):
        if isinstance(row.get(field), kind):
            return row[field]
    raise ValueError(f'{place}: expected an object with "text" or "messages", got {line[:60]!r}.')

"""`hf-domino check`: does a drafter fit its target; exit code 0 if it does, 1 if not, 3 if too little was measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hf_domino.cli.exits import FAILED_CHECK, UNDECIDED
from hf_domino.cli.flags import DTYPES, positive_int, set_up

EXAMPLES = """\
  hf-domino check --target Qwen/Qwen3-0.6B --drafter my-drafter
  hf-domino check --target my-target --drafter my-drafter --prompts prompts.jsonl --device cuda --dtype bfloat16
"""
EXIT_CODES = {"fits": 0, "does not fit": FAILED_CHECK, "too few to say": UNDECIDED}  # by the verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino check`."""
    parser.add_argument("--target", help="folder or Hub name of the target (default: the bundled one)")
    parser.add_argument("--drafter", help="folder or Hub name of the drafter (default: NAME-domino beside the target)")
    parser.add_argument(
        "--prompts", type=Path, help="JSONL with `text` or `messages` (default: prompts.jsonl of the target, or own)"
    )
    parser.add_argument("--num-prompts", type=positive_int, default=12, help="use at most N prompts of the file")
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, help="tokens to generate per prompt")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of both models")
    parser.add_argument("--device", default="cpu", help="device of both models")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino check`; returns 1 if the drafter does not fit, 3 if too little was measured."""
    from hf_domino.check import check_fit
    from hf_domino.pair import DTYPES, check_device, load_pair

    check_device(options.device)
    set_up()
    target = options.target or _bundled_target()
    prompts = _read_prompts(options.prompts or _prompts_of(target), options.num_prompts)
    pair = load_pair(target, options.drafter, dtype=DTYPES[options.dtype], device=options.device)
    result = check_fit(pair.drafter, pair.target, pair.tokenizer, prompts, options.max_new_tokens)
    print(f"target {target}\ndrafter {pair.drafter.config.name_or_path}\n\n{result}")
    return EXIT_CODES[result.verdict]


def _bundled_target() -> str:
    from hf_domino.pair import find_pair

    try:
        return str(find_pair())
    except FileNotFoundError as error:
        raise ValueError("--target must be given: the bundled pair is not in this checkout or folder.") from error


def _prompts_of(target: str) -> Path | None:
    from hf_domino.pair import PROMPTS

    path = Path(target) / PROMPTS
    return path if path.is_file() else None


def _read_prompts(path: Path | None, count: int) -> list[Any] | None:
    """The first prompts of a file, each a text or a list of messages; None for the defaults."""
    if path is None:
        return None
    from hf_domino.pair import read_prompts

    prompts = read_prompts(path)[:count]
    if not prompts:
        raise ValueError(f"--prompts must hold at least one prompt, got none in {path}.")
    return [prompt.get("messages", prompt.get("text")) for prompt in prompts]

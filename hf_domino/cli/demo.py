"""`hf-domino demo`: one prompt, generated plainly and with the drafter; the outputs must be equal."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.cli.flags import add_models, check_temperature, load_models, positive_int
from hf_domino.cli.generate import prompt_of

if TYPE_CHECKING:
    from hf_domino.pair import Pair

EXAMPLES = """\
  hf-domino demo
  hf-domino demo --prompt "def median(values):" --max-new-tokens 64
  hf-domino demo --temperature 0.7 --seed 3
"""
TYPICAL = 5  # prompt of the bundled pair whose speed-up is about the median of all, and whose text does not loop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino demo`."""
    parser.add_argument("--prompt", help="text to continue, or to answer by a chat model (default: a held-out prompt)")
    parser.add_argument("--index", type=int, help="which held-out prompt of the pair, from 0 (default: a typical one)")
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, help="tokens to generate")
    parser.add_argument("--temperature", type=float, default=0.0, help="sample at this temperature; 0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is sampled")
    parser.add_argument(
        "--lookup-tokens", type=positive_int, metavar="N", help="also copy up to N tokens from the text"
    )
    parser.add_argument(
        "--repeats",
        type=positive_int,
        default=1,
        help="timed runs of each behind those that are shown; the median counts",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_models(parser.add_argument_group("models"), measures=True)


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino demo`; returns 1 if the outputs differ."""
    if options.prompt == "":
        raise ValueError("--prompt must be a text, got an empty one.")
    check_temperature(options.temperature)
    from rich.console import Console

    from hf_domino.cli.comparison import compare, show, to_json

    pair = load_models(options)
    prompt = _prompt_of(pair, options)
    console = Console(highlight=False, soft_wrap=True, quiet=options.json)
    comparison = compare(pair, prompt, options, console)
    if options.json:
        print(json.dumps(to_json(pair, prompt, comparison, options)))
    else:
        show(console, pair, comparison, options)
    return 0 if comparison.equal else FAILED_CHECK


def _prompt_of(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    if not options.prompt:
        return _held_out_prompt(pair, options.index)
    return prompt_of(pair, [{"role": "user", "content": options.prompt}])


def _held_out_prompt(pair: Pair, index: int | None) -> dict[str, Any]:
    from hf_domino.pair import PROMPTS, read_prompts

    prompts = read_prompts(pair.folder / PROMPTS)
    if index is None:
        index = TYPICAL % len(prompts)
    if not 0 <= index < len(prompts):
        raise ValueError(f"--index must be in [0, {len(prompts) - 1}] for {pair.name}, got {index}.")
    return prompts[index]

"""`hf-domino generate`: answer one prompt with a target and its drafter, with text on stdout and statistics on stderr.

With `--compare`, the target also answers alone, and both texts must be equal.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.cli.flags import add_choice, add_models, choice_of, load_models, with_lookup

if TYPE_CHECKING:
    from hf_domino.pair import Pair

EXAMPLES = """\
  hf-domino generate --compare
  hf-domino generate "def median(values):"
  hf-domino generate --target Qwen/Qwen3-8B --drafter Huang2020/Qwen3-8B-Domino-b16 "Why is the sky blue?"
  git diff | hf-domino generate --target my-target --drafter my-drafter --temperature 0.7 --seed 1 -
"""
TYPICAL = 5  # index of a bundled prompt with about the median speed-up, whose text does not loop


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino generate`."""
    held_out = "default: a held-out prompt from the target's folder, or a bundled one"
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help=f"the text, or - to read it from stdin ({held_out})"
    )
    parser.add_argument("--compare", action="store_true", help="generate without the drafter, too, and compare both")
    parser.add_argument("--rounds", action="store_true", help="mark where each round ends")
    add_choice(parser.add_argument_group("choice of tokens"), max_new_tokens=256)
    add_models(parser.add_argument_group("models"))


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino generate`, and return 1 if `--compare` finds a difference in fp32."""
    prompt = options.prompt
    if prompt == "-":
        prompt = sys.stdin.read()
    if prompt == "":
        raise ValueError("PROMPT must be a text, got an empty one.")
    from rich.console import Console

    arguments = choice_of(options)
    pair = load_models(options)
    arguments = with_lookup(arguments, pair)
    asked = _asked(pair, prompt)
    console = Console(highlight=False, soft_wrap=options.compare)
    if options.compare:
        from hf_domino.cli.comparison import compare, show

        comparison = compare(pair, asked, arguments, options.seed or 0, console)
        show(console, pair, comparison)
        if comparison.is_exact and not comparison.equal:
            return FAILED_CHECK
        return 0

    from hf_domino.cli.streaming import RoundPrinter
    from hf_domino.evaluation.benchmark.prompts import inputs_of

    printer = RoundPrinter(pair.tokenizer, console, options.rounds)
    pair.target.generate(**inputs_of(pair, [asked]), **arguments, assistant_model=pair.drafter, streamer=printer)
    print(f"\n{pair.drafter.stats.summary}", file=sys.stderr)
    return 0


def _asked(pair: Pair, prompt: str | None) -> dict[str, Any]:
    """Turn the user's text into a prompt; without a text, choose a prompt of the target's folder or a bundled one."""
    if prompt is not None:
        return pair.ask([{"role": "user", "content": prompt}])
    from hf_domino.pair import prompts_for

    prompts, _ = prompts_for(pair)
    return prompts[TYPICAL % len(prompts)]

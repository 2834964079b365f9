"""`hf-domino generate`: answer one prompt with a target and its drafter, with text on stdout and statistics on stderr.

With `--compare`, the target also answers alone, and both texts must be equal.
"""

from __future__ import annotations

import argparse
import sys

from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.cli.flags import add_choice, add_models, add_prompt, prompt_of

EXAMPLES = """\
  hf-domino generate --compare
  hf-domino generate "def median(values):"
  hf-domino generate --target Qwen/Qwen3-8B --drafter Huang2020/Qwen3-8B-Domino-b16 "Why is the sky blue?"
  git diff | hf-domino generate --target my-target --drafter my-drafter --temperature 0.7 --seed 1 -
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino generate`."""
    add_prompt(parser)
    parser.add_argument("--compare", action="store_true", help="generate without the drafter, too, and compare both")
    parser.add_argument("--rounds", action="store_true", help="mark where each round ends")
    add_choice(parser.add_argument_group("choice of tokens"), max_new_tokens=256)
    add_models(parser.add_argument_group("models"))


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino generate`, and return 1 if `--compare` finds a difference in fp32."""
    text = prompt_of(options)
    from rich.console import Console

    from hf_domino.cli.answers import RoundPrinter, asked, compare, open_pair, show
    from hf_domino.evaluation.benchmark.prompts import inputs_of

    pair, arguments = open_pair(options)
    prompt = asked(pair, text)
    console = Console(highlight=False, soft_wrap=options.compare)
    if options.compare:
        comparison = compare(pair, prompt, arguments, options.seed or 0, console)
        show(console, pair, comparison)
        if comparison.is_exact and not comparison.equal:
            return FAILED_CHECK
        return 0
    printer = RoundPrinter(pair.tokenizer, console, options.rounds)
    pair.target.generate(**inputs_of(pair, [prompt]), **arguments, assistant_model=pair.drafter, streamer=printer)
    print(f"\n{pair.drafter.stats.summary}", file=sys.stderr)
    return 0

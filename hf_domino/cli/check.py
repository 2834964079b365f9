"""`hf-domino check`: find out whether a drafter fits its target.

The exit code is 0 if it fits, 1 if it does not, and 3 if too little was measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_domino._common.errors import invalid_argument
from hf_domino._common.fields import PROMPTS_HELP
from hf_domino.cli.exits import FAILED_CHECK, UNDECIDED
from hf_domino.cli.flags import add_models, load_models, positive_int

EXAMPLES = """\
  hf-domino check --target Qwen/Qwen3-0.6B --drafter my-drafter
  hf-domino check --target my-target --drafter my-drafter --prompts prompts.jsonl --device cuda --json
"""
EXIT_CODES = {"fits": 0, "does not fit": FAILED_CHECK, "too few to say": UNDECIDED}  # by the verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino check`."""
    add_models(parser.add_argument_group("models"), is_drafted=True)
    parser.add_argument(
        "--prompts",
        type=Path,
        help=PROMPTS_HELP,
    )
    number_help = "number of prompts, from the first one on"
    parser.add_argument("--num-prompts", type=positive_int, default=12, help=number_help)
    length_help = "maximum number of tokens to generate per prompt (default: 64)"
    parser.add_argument("--max-new-tokens", type=positive_int, help=length_help)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino check`; return 1 if the drafter does not fit, and 3 if too little was measured."""
    from hf_domino.evaluation.check import MAX_NEW_TOKENS, check_fit
    from hf_domino.formats.adapters import unread_fields
    from hf_domino.formats.source import RECYCLING
    from hf_domino.pair import is_recycling, prompts_for, read_prompts

    if is_recycling(options.drafter):
        remedy = "It has no weights, and drafts for every target. Measure it with hf-domino bench --drafter recycling."
        raise invalid_argument("--drafter", "a drafter that was trained for a target", RECYCLING, remedy)

    if options.prompts is not None:  # a wrong file is an error before models are loaded
        read_prompts(options.prompts, is_chat=True)
    pair = load_models(options, is_drafted=True)
    prompts = prompts_for(pair, options.prompts)[0][: options.num_prompts]
    length = options.max_new_tokens or MAX_NEW_TOKENS
    result = check_fit(pair.drafter, pair.target, pair.tokenizer, prompts, length, progress=True)
    drafter = options.drafter or pair.drafter.config.name_or_path
    names = {"target": options.target or str(pair.folder), "drafter": drafter}
    unread = unread_fields(pair.drafter.config.name_or_path)
    if options.json:
        print(json.dumps(names | result.to_dict() | {"not_read": unread}))
    else:
        print(f"target {names['target']}\ndrafter {names['drafter']}\n\n{result}")
        if unread:
            print(f"\nFields of the drafter's config.json that are not read: {', '.join(unread)}.")
    return EXIT_CODES[result.verdict]

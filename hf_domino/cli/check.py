"""`hf-domino check`: find out whether a drafter fits its target.

The exit code is 0 if it fits, 1 if it does not, and 3 if too little was measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hf_domino._common.fields import PROMPT_FIELDS
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
        help=f"file of records with {PROMPT_FIELDS} (default: prompts.jsonl of the target, or a dozen short ones)",
    )
    number_help = "maximum number of prompts of the file"
    parser.add_argument("--num-prompts", type=positive_int, default=12, help=number_help)
    length_help = "maximum number of tokens to generate per prompt (default: 64)"
    parser.add_argument("--max-new-tokens", type=positive_int, help=length_help)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino check`; return 1 if the drafter does not fit, and 3 if too little was measured."""
    from hf_domino.evaluation.check import MAX_NEW_TOKENS, check_fit
    from hf_domino.formats.adapters import unread_fields
    from hf_domino.pair import PROMPTS, read_prompts

    # Read the file first, so that a wrong one is an error before models are loaded.
    prompts = None
    if options.prompts is not None:
        prompts = read_prompts(options.prompts)
    pair = load_models(options, is_drafted=True)
    own = pair.folder / PROMPTS
    if prompts is None and own.is_file():
        prompts = read_prompts(own)
    texts = None
    if prompts is not None:
        chosen = prompts[: options.num_prompts]
        texts = [prompt if "messages" in prompt else prompt["text"] for prompt in chosen]
    length = options.max_new_tokens or MAX_NEW_TOKENS
    result = check_fit(pair.drafter, pair.target, pair.tokenizer, texts, length, progress=True)
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

"""`hf-domino check`: does a drafter fit its target; exit code 0 if it does, 1 if not, 3 if too little was measured."""

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
    add_models(parser.add_argument_group("models"))
    parser.add_argument(
        "--prompts",
        type=Path,
        help=f"records with {PROMPT_FIELDS} (default: prompts.jsonl of the target, or a dozen short ones)",
    )
    parser.add_argument("--num-prompts", type=positive_int, default=12, help="use at most N prompts of the file")
    parser.add_argument("--max-new-tokens", type=positive_int, default=64, help="tokens to generate per prompt")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino check`; returns 1 if the drafter does not fit, 3 if too little was measured."""
    from hf_domino.evaluation.benchmark.prompts import read_batches
    from hf_domino.evaluation.check import check_fit
    from hf_domino.pair import PROMPTS

    # A wrong file is refused before models are loaded.
    given = options.prompts and read_batches(options.prompts, options.num_prompts, batch_size=1)
    pair = load_models(options)
    if given is None and (own := pair.folder / PROMPTS).is_file():
        given = read_batches(own, options.num_prompts, batch_size=1)
    prompts = given and [prompt if "messages" in prompt else prompt["text"] for (prompt,) in given]
    result = check_fit(pair.drafter, pair.target, pair.tokenizer, prompts, options.max_new_tokens, progress=True)
    drafter = options.drafter or pair.drafter.config.name_or_path
    names = {"target": options.target or str(pair.folder), "drafter": drafter}
    if options.json:
        print(json.dumps(names | result.to_dict()))
    else:
        print(f"target {names['target']}\ndrafter {names['drafter']}\n\n{result}")
    return EXIT_CODES[result.verdict]

"""`hf-domino check`: does a drafter fit its target, and does a vLLM server draft with it as we do.

Exit code 0 if it does, 1 if not, 3 if too little was measured.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino.cli.exits import BY_SIGNAL, FAILED_CHECK, UNDECIDED
from hf_domino.cli.flags import add_models, load_models, positive_int

if TYPE_CHECKING:
    from hf_domino.pair import Pair

EXAMPLES = """\
  hf-domino check --target Qwen/Qwen3-0.6B --drafter my-drafter
  hf-domino check --target my-target --drafter my-drafter --prompts prompts.jsonl --device cuda --json
  hf-domino check --vllm vllm-env/bin/python --num-prompts 10 --max-new-tokens 64
  hf-domino check --vllm vllm-env/bin/python --at-once 1,4,8 --server-flags="--enforce-eager"
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
    number_help = "use at most N prompts of the file (default: 12, of a server 50)"
    parser.add_argument("--num-prompts", type=positive_int, help=number_help)
    length_help = "tokens to generate per prompt (default: 64, of a server 128)"
    parser.add_argument("--max-new-tokens", type=positive_int, help=length_help)
    add = parser.add_argument_group("vLLM's server").add_argument
    add("--vllm", metavar="PYTHON", help="compare with us vLLM's server of this Python's environment")
    add("--num-proposals", type=positive_int, help="proposals of a round (default: block_size - 1)")
    at_once_help = "requests open together, a run each"
    add("--at-once", type=_counts, default="1,8", help=at_once_help)
    flags_help = 'more flags of vLLM\'s server, as --server-flags="--enforce-eager"'
    add("--server-flags", type=shlex.split, default=[], help=flags_help)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino check`; returns 1 if the drafter does not fit, 3 if too little was measured.

    Of a server 1 where texts differ in fp32, or rounds are more than ours.
    """
    from hf_domino.pair import PROMPTS, read_prompts

    if options.vllm:
        signal.signal(signal.SIGTERM, _leave)  # so that the server ends with us
        options.dtype = options.dtype or "float32"
    num_prompts = options.num_prompts or (50 if options.vllm else 12)
    # A wrong file is refused before models are loaded.
    prompts = options.prompts and read_prompts(options.prompts)
    pair = load_models(options)
    if prompts is None and (own := pair.folder / PROMPTS).is_file():
        prompts = read_prompts(own)
    return (_check_server if options.vllm else _check_fit)(options, pair, prompts and prompts[:num_prompts])


def _check_fit(options: argparse.Namespace, pair: Pair, prompts: list[dict] | None) -> int:
    from hf_domino.evaluation.check import MAX_NEW_TOKENS, check_fit
    from hf_domino.formats.loading import unread_fields

    texts = prompts and [prompt if "messages" in prompt else prompt["text"] for prompt in prompts]
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


def _check_server(options: argparse.Namespace, pair: Pair, prompts: list[dict] | None) -> int:
    from hf_domino._common.provenance import provenance
    from hf_domino.serving.check import check_server, faults, report, rows

    if not prompts:
        raise ValueError(f"--prompts must be given: {pair.folder} has no prompts.jsonl.")
    most = str(max(options.at_once))
    flags = ["--dtype", options.dtype, "--generation-config", "vllm", "--max-num-seqs", most]
    made = {
        "dtype": options.dtype,
        "num_proposals": options.num_proposals or pair.drafter.config.block_size - 1,
        "flags": [*flags, *options.server_flags],
    }
    length = options.max_new_tokens or 128
    asked = {"python": options.vllm, "max_new_tokens": length, "at_once": options.at_once}
    legs = check_server(pair, prompts, **asked, **made)
    if options.json:
        for row in rows(legs):
            print(json.dumps(row | {"target": pair.name} | made | provenance()))
    else:
        print(report(legs, options.dtype))
    return FAILED_CHECK if faults(legs, options.dtype) else 0


def _counts(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part) for part in text.split(","))


def _leave(number: int, _: object) -> None:
    sys.exit(BY_SIGNAL + number)

"""`hf-domino serve-check`: does a vLLM server draft as we do; exit code 0 if it does, 1 if not."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from pathlib import Path

from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino.cli.exits import BY_SIGNAL, FAILED_CHECK
from hf_domino.cli.flags import add_models, load_models, positive_int

EXAMPLES = """\
  hf-domino serve-check --python vllm-env/bin/python --num-prompts 10 --max-new-tokens 64
  hf-domino serve-check --target Qwen/Qwen3-0.6B --drafter my-drafter --at-once 1,4,8 --server-flags="--enforce-eager"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino serve-check`."""
    add_models(parser.add_argument_group("models"), measures=True)
    add = parser.add_argument_group("texts").add_argument
    add("--prompts", type=Path, help=f"records with {PROMPT_FIELDS} (default: prompts.jsonl of the target)")
    add("--num-prompts", type=positive_int, default=50, help="use the first N prompts")
    add("--max-new-tokens", type=positive_int, default=128, help="tokens to generate per prompt")
    add = parser.add_argument_group("server").add_argument
    add("--python", default=sys.executable, help="Python of the environment with vLLM and hf_domino (default: this)")
    add("--num-proposals", type=positive_int, help="proposals of a round (default: block_size - 1)")
    add("--at-once", type=_counts, default=(1, 8), help="requests open together, a run each (default: 1,8)")
    flags_help = 'more flags of vLLM\'s server, as --server-flags="--enforce-eager"'
    add("--server-flags", type=shlex.split, default=[], help=flags_help)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino serve-check`; returns 1 where texts differ in fp32, or rounds are more than ours."""
    from hf_domino._common.provenance import provenance
    from hf_domino.pair import PROMPTS, read_prompts
    from hf_domino.serving.check import check_server, faults, report, rows

    signal.signal(signal.SIGTERM, _leave)  # so that the server ends with us
    given = options.prompts and read_prompts(options.prompts)  # a wrong file is refused before models are loaded
    pair = load_models(options)
    if not given and not (pair.folder / PROMPTS).is_file():
        raise ValueError(f"--prompts must be given: {pair.folder} has no {PROMPTS}.")
    prompts = (given or read_prompts(pair.folder / PROMPTS))[: options.num_prompts]
    flags = ["--dtype", options.dtype, "--generation-config", "vllm", "--max-num-seqs", str(max(options.at_once))]
    made = {
        "dtype": options.dtype,
        "num_proposals": options.num_proposals or pair.drafter.config.block_size - 1,
        "flags": [*flags, *options.server_flags],
    }
    asked = {"python": options.python, "max_new_tokens": options.max_new_tokens, "at_once": options.at_once}
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

"""`hf-domino data`: let a target write the text on which its drafter is trained."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hf_domino._common.atomic_writes import check_writable
from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino._common.options import add_flags
from hf_domino.cli.flags import (
    DEFAULT_DTYPE,
    DTYPE,
    TRUST_HELP,
    default_device,
    readable,
    say_if_busy,
    set_up,
    thread_count,
)
from hf_domino.data.settings import WritingSettings

EXAMPLES = """\
  hf-domino data --target Qwen/Qwen3-0.6B --output data --num-examples 4096 --num-eval-examples 64
  hf-domino data --target Qwen/Qwen3-0.6B --output data --prompts chats.jsonl --exclude benchmark.jsonl
  torchrun --nproc-per-node 2 -m hf_domino.cli data --target my-model --output data
  hf-domino data --target Qwen/Qwen3-8B --output data --endpoint http://localhost:8000/v1 --endpoint-model qwen3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino data`."""
    add = parser.add_argument
    add("--target", required=True, help="folder or Hub name of the target")
    add("--output", type=Path, required=True, help="folder for train.jsonl, evaluation.jsonl and report.json")
    add = parser.add_argument_group("prompts (by default a chat model writes its own)").add_argument
    add(
        "--prompts",
        type=Path,
        nargs="+",
        default=[],
        help=f"files of records with {PROMPT_FIELDS}, or chat, code, maths or text for bundled ones",
    )
    add(
        "--exclude",
        type=Path,
        nargs="+",
        default=[],
        help="files whose texts must not occur in the prompts, such as benchmarks, named like those of --prompts",
    )
    group = parser.add_argument_group("how to write the text")
    add_flags(group, WritingSettings)
    # The old name of --chat-template-kwargs.
    group.add_argument(
        "--template-kwargs",
        dest="chat_template_kwargs",
        type=json.loads,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
    add = parser.add_argument_group("which model writes, and where").add_argument
    add("--trust-remote-code", action="store_true", help=TRUST_HELP)
    add("--dtype", **DTYPE, help=f"dtype of the target (default: {DEFAULT_DTYPE})")
    add("--device", help="device of the target (default: cuda if there is a GPU, else cpu)")
    add("--threads", type=thread_count, help="number of CPU threads (default: chosen by torch)")
    add("--endpoint", help="address of a vLLM or SGLang server that generates the text")
    add("--endpoint-model", help="name of the target on that server (default: --target)")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino data`."""
    from hf_domino.configuration.from_target import within_window
    from hf_domino.data.prompts import prompt_file
    from hf_domino.data.self_written import check_writes_prompts
    from hf_domino.data.writing import write_data
    from hf_domino.pair import find_target
    from hf_domino.targets.loading import load_config, trusting

    with readable("--system"):
        (options.system or "").encode()
    for name in ("prompts", "exclude"):  # before anything is loaded
        setattr(options, name, [prompt_file(path, f"--{name}") for path in getattr(options, name)])
    check_writable(options.output, "--output")
    settings = WritingSettings(**{each.name: getattr(options, each.name) for each in fields(WritingSettings)})
    options.target = find_target(options.target)
    shard = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # torchrun sets them
    from transformers import AutoTokenizer

    set_up(options.threads)
    trust = trusting(options.trust_remote_code)
    tokenizer = AutoTokenizer.from_pretrained(options.target, **trust)
    if not options.prompts:
        check_writes_prompts(tokenizer)  # first: a base model cannot write prompts, whatever its context window is
    config = load_config(options.target, **trust)
    settings = replace(settings, max_length=within_window(config, settings.max_length, settings.max_new_tokens))
    load = _from_endpoint if options.endpoint else _from_target
    writer, ends, identity = load(options, tokenizer)
    texts = settings, options.prompts, options.exclude
    is_first = shard[0] == 0
    report = write_data(writer, tokenizer, ends, options.output, *texts, identity, shard, is_first)
    if is_first:
        print(json.dumps(report, indent=1))
    return 0


def _from_target(options: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any, Any]:
    """Load the target into this process; return its writer, the tokens that end its texts, and its identity."""
    from hf_domino.configuration.from_target import eos_ids_of
    from hf_domino.data.writers import CHUNK, TargetWriter
    from hf_domino.pair import choose_dtype
    from hf_domino.targets.identity import identify
    from hf_domino.targets.loading import AutoTarget, trusting

    device = options.device or default_device()
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    say_if_busy(device, options.threads)
    dtype = choose_dtype(options.dtype, device, options.target, options.trust_remote_code)
    trust = trusting(options.trust_remote_code)
    target = AutoTarget.from_pretrained(options.target, dtype=dtype, **trust).to(device).eval()
    return (
        TargetWriter(target, CHUNK, progress=os.environ.get("RANK", "0") == "0"),
        eos_ids_of(target.generation_config),
        identify(target),
    )


def _from_endpoint(options: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any, Any]:
    """Connect to the server; return the target's writer, the tokens that end its texts, and its identity."""
    from transformers import GenerationConfig

    from hf_domino.configuration.from_target import eos_ids_of
    from hf_domino.data.writers import EndpointWriter
    from hf_domino.targets.identity import TargetIdentity
    from hf_domino.targets.loading import load_config, trusting

    try:
        config = GenerationConfig.from_pretrained(options.target)
    except OSError:  # a target without a generation configuration
        trust = trusting(options.trust_remote_code)
        config = load_config(options.target, **trust).get_text_config(decoder=True)
    ends = eos_ids_of(config)
    if tokenizer.eos_token_id in ends:  # the server's own end token comes first
        ends = tuple(dict.fromkeys((tokenizer.eos_token_id, *ends)))
    model = options.endpoint_model or options.target
    return EndpointWriter(options.endpoint, model, ends), ends, TargetIdentity(name=model)

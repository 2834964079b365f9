"""`hf-domino data`: let a target write the text that its drafter is trained on."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_domino._common.dtypes import dtype_of, fast_dtype
from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino._common.whole_files import check_writable
from hf_domino.cli.flags import DTYPE, positive_int

if TYPE_CHECKING:
    from hf_domino.data.settings import WritingSettings

EXAMPLES = """\
  hf-domino data --target Qwen/Qwen3-0.6B --output data --rows 4096 --eval-rows 64
  hf-domino data --target Qwen/Qwen3-0.6B --output data --prompts chats.jsonl --exclude benchmark.jsonl
  torchrun --nproc-per-node 2 -m hf_domino.cli data --target my-model --output data
  hf-domino data --target Qwen/Qwen3-8B --output data --endpoint http://localhost:8000/v1 --endpoint-model qwen3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino data`."""
    parser.add_argument("--target", required=True, help="folder or Hub name of the target")
    parser.add_argument(
        "--output", type=Path, required=True, help="folder for train.jsonl, evaluation.jsonl, report.json"
    )
    parser.add_argument("--overwrite", action="store_true", help="start a folder with other settings again")
    _add_prompts(parser.add_argument_group("prompts (by default a chat model writes its own)"))
    _add_answers(parser.add_argument_group("answers"))
    _add_place(parser.add_argument_group("who writes, and where"))


def _add_prompts(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompts", type=Path, nargs="+", default=[], help=f"records with {PROMPT_FIELDS}")
    group.add_argument("--rows", type=positive_int, help="prompts to answer (default: 1024 of its own, all of a file)")
    group.add_argument("--exclude", type=Path, nargs="+", default=[], help="files of prompts to keep out")
    group.add_argument(
        "--plain", action="store_true", help="a `prompt` is text to continue, as a `text` is, no user's turn"
    )
    group.add_argument("--system", help="system turn of chats that have none (default: the template's)")
    group.add_argument("--template-kwargs", type=_mapping, help="""JSON, such as '{"enable_thinking": false}'""")
    group.add_argument("--prompt-temperature", type=float, help="of its own prompts (default: 0.9)")
    group.add_argument("--prompt-top-p", type=float, help="of its own prompts (default: 0.95)")
    group.add_argument("--max-prompt-tokens", type=positive_int, help="longest prompt of its own (default: 128)")


def _add_answers(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--temperatures", type=float, nargs="+", help="batches take them in turn (default: 0 0.7 1)")
    group.add_argument("--max-new-tokens", type=positive_int, help="longest answer (default: 512)")
    group.add_argument("--max-length", type=positive_int, help="longest row, prompt included (default: 4096)")
    group.add_argument("--min-distinct", type=float, help="least share of distinct 4-grams in a text (default: 0.5)")
    group.add_argument("--keep-unended", action="store_true", help="keep answers cut at --max-new-tokens")
    group.add_argument("--eval-rows", type=int, help="chats for evaluation.jsonl (default: 0)")
    group.add_argument("--seed", type=int, help="of the sampling (default: 0)")


def _add_place(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch-size", type=positive_int, help="texts written side by side (default: 64)")
    dtype_help = "default: bfloat16 where the hardware has it, else float32"
    group.add_argument("--dtype", **DTYPE, help=dtype_help)
    group.add_argument("--device", help="default: cuda where there is a GPU, else cpu")
    group.add_argument("--threads", type=positive_int, help="CPU threads of torch (default: as torch chooses)")
    group.add_argument("--shard", type=_shard, metavar="I/N", help="process I of N, from 0 (default: torchrun's)")
    group.add_argument("--endpoint", help="address of a vLLM or SGLang server that writes")
    group.add_argument("--endpoint-model", help="name of the target there (default: --target)")


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text!r}: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N - 1, got {text!r}")
    return int(index), int(count)


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino data`."""
    from hf_domino.pair import find_target

    for name in ("prompts", "exclude"):  # before anything is loaded
        for path in getattr(options, name):
            if not path.is_file():
                raise ValueError(f"--{name} must be files of records, got {str(path)!r}: there is none of that name.")
    check_writable(options.output, "--output")
    settings = _settings(options)
    options.target = find_target(options.target)
    shard = options.shard or (int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))
    report = _write(options, settings, shard)
    if shard[0] == 0:
        print(json.dumps(report, indent=1))
    return 0


def _settings(options: argparse.Namespace) -> WritingSettings:
    """The settings that were given as flags."""
    from hf_domino.data.settings import WritingSettings

    given = {field.name: getattr(options, field.name) for field in fields(WritingSettings)}
    if given["temperatures"] is not None:
        given["temperatures"] = tuple(given["temperatures"])
    return WritingSettings(**{name: value for name, value in given.items() if value is not None})


def _write(options: argparse.Namespace, settings: WritingSettings, shard: tuple[int, int]) -> dict[str, Any]:
    from transformers import AutoConfig, AutoTokenizer

    from hf_domino.cli.flags import set_up
    from hf_domino.configuration.from_target import within_window
    from hf_domino.data.user_turn import check_chat_template
    from hf_domino.data.writing import write_data

    set_up(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    if not options.prompts:
        check_chat_template(tokenizer)  # before its window, which is not what keeps a base model from asking itself
    target_config = AutoConfig.from_pretrained(options.target)
    longest = within_window(target_config, settings.max_length, settings.max_new_tokens)
    settings = replace(settings, max_length=longest)
    writer, ends, identity = (_from_endpoint if options.endpoint else _from_target)(options, tokenizer)
    return write_data(
        writer,
        tokenizer,
        ends,
        options.output,
        settings,
        options.prompts,
        options.exclude,
        identity,
        shard,
        progress=shard[0] == 0,
        overwrite=options.overwrite,
    )


def _from_target(options: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any, Any]:
    """The target in this process, the tokens that end its texts, and who it is."""
    from hf_domino.cli.flags import default_device
    from hf_domino.data.writers import CHUNK, TargetWriter, ends_of
    from hf_domino.pair import check_device
    from hf_domino.target.identity import identify
    from hf_domino.target.loading import AutoTarget

    device = options.device or default_device()
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    check_device(device)
    dtype = dtype_of(options.dtype) if options.dtype else fast_dtype(device)
    target = AutoTarget.from_pretrained(options.target, dtype=dtype).to(device).eval()
    return TargetWriter(target, chunk=CHUNK), ends_of(target.generation_config), identify(target, tokenizer)


def _from_endpoint(options: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any, Any]:
    from transformers import GenerationConfig

    from hf_domino.data.endpoint import EndpointWriter
    from hf_domino.data.writers import ends_of
    from hf_domino.target.identity import TargetIdentity

    try:
        ends = ends_of(GenerationConfig.from_pretrained(options.target))
    except OSError:  # a target without one
        ends = (tokenizer.eos_token_id,)
    model = options.endpoint_model or options.target
    writer = EndpointWriter(options.endpoint, model, tokenizer, ends)
    return writer, ends, TargetIdentity(name=model, tokenizer_size=len(tokenizer))

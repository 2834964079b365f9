"""Define the flags that several commands share.

Like all modules of commands, this one has no slow imports. If the allowed values of a flag are defined in a module that
needs torch, they are repeated here, and a test compares the two.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hf_domino._common.dtypes import DTYPES, dtype_name
from hf_domino._common.errors import invalid_argument
from hf_domino._common.fields import MOST_SEED
from hf_domino._common.verdict import busy_hint, load_per_core

if TYPE_CHECKING:
    from hf_domino.pair import Pair

DEFAULT_DTYPE = "float32 on a CPU; on a GPU that of the checkpoint, or float16 if the card has no bfloat16"
DTYPE: Any = {"type": dtype_name, "choices": DTYPES}  # arguments of add_argument for --dtype
ENGINE_NAMES = ("sglang", "vllm", "dflash")
FORMATS = ("specforge", "speculators")


def number(least: float, most: float = math.inf, kind: type = int) -> Callable[[str], Any]:
    """Make a function that reads a number in this range from a flag, and whose errors argparse reports."""
    expected = f"of at least {least}" if most == math.inf else f"in [{least}, {most}]"

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or value == math.inf:
            raise argparse.ArgumentTypeError(f"must be a number {expected}, got {text!r}")
        return value

    return read


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object from a flag; argparse reports the error."""
    value = None
    with suppress(ValueError):
        value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, such as {EXAMPLE}, got {text!r}")
    return value


EXAMPLE = """'{"enable_thinking": false}'"""
TEMPLATE_HELP = f"variables for the chat template, as JSON: {EXAMPLE}"
TRUST_HELP = "run the code that comes with a model, which Transformers asks for; read it first"
LOOKUP_TOKENS = 10
positive_int = number(1)
thread_count = number(1, 1024)  # torch starts as many threads as it is told to


def add_models(group: argparse._ArgumentGroup, measures: bool = False, is_drafted: bool = False) -> None:
    """Add flags for a target, its drafter, their device and dtype, which [`load_models`] reads.

    With `measures`, the command accepts several drafters. With `is_drafted`, it needs a drafter with weights.
    """
    action = "store"
    drafter_help = ""
    if measures:
        action = "append"
        drafter_help = "; repeat the flag to compare several drafters"
    add = group.add_argument
    add("--target", help="folder or Hub name of the target (default: the bundled one)")
    names = "folder or Hub name of the drafter"
    beside = "NAME-domino beside the target or in a clone's model_cards/"
    if not is_drafted:
        names += ", or recycling (token recycling, which needs no training)"
        beside += ", else recycling"
    add("--drafter", action=action, help=f"{names} (default: {beside}){drafter_help}")
    add("--chat-template-kwargs", type=json_object, default={}, metavar="JSON", help=TEMPLATE_HELP)
    add("--trust-remote-code", action="store_true", help=TRUST_HELP)
    add("--dtype", **DTYPE, help=f"dtype of all models (default: {DEFAULT_DTYPE})")
    add("--device", help="device of all models (default: cuda if there is a GPU, else cpu)")
    add("--threads", type=thread_count, help="number of CPU threads (default: chosen by torch)")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add PROMPT, which [`prompt_of`] reads."""
    held_out = "default: a held-out prompt from the target's folder, or a bundled one"
    parser.add_argument(
        "prompt", metavar="PROMPT", nargs="?", help=f"the text, or - to read it from stdin ({held_out})"
    )


@contextmanager
def readable(field: str) -> Iterator[None]:
    """Turn errors about bytes that are not UTF-8, which no tokenizer reads, into one sentence."""
    try:
        yield
    except UnicodeError as error:
        remedy = f"Convert it first, as with iconv: {error.reason} at {error.start}."  # type: ignore[attr-defined]
        raise invalid_argument(field, "a text in UTF-8", "other bytes", remedy) from error


def prompt_of(options: argparse.Namespace) -> str | None:
    """Return the text of PROMPT or of stdin; None if there was none."""
    prompt: str | None = options.prompt
    if prompt == "-":
        with readable("stdin"):
            prompt = sys.stdin.read()
    with readable("PROMPT"):
        (prompt or "").encode()
    if prompt == "":
        raise ValueError("PROMPT must be a text, got an empty one.")
    return prompt


def add_choice(group: argparse._ArgumentGroup, max_new_tokens: int) -> None:
    """Add flags for how tokens are chosen, which [`choice_of`] reads; the target's configuration decides the rest."""
    add = group.add_argument
    own = "(default: as the target's generation configuration says)"
    add("--max-new-tokens", type=positive_int, default=max_new_tokens, help="maximum number of tokens per answer")
    add("--temperature", type=number(0, kind=float), help=f"sampling temperature; 0 decodes greedily {own}")
    add("--top-k", type=number(0), metavar="K", help=f"sample from the K most likely tokens; 0 from all {own}")
    add(
        "--top-p",
        type=number(0, 1, float),
        metavar="P",
        help=f"sample from the most likely tokens whose probabilities add up to P {own}",
    )
    add("--seed", type=number(0, MOST_SEED), help="random seed for sampling")
    add(
        "--lookup-tokens",
        type=number(0),
        metavar="N",
        default=LOOKUP_TOKENS,
        help="prompt lookup: a round may propose up to N tokens that followed the same words earlier in the text; "
        "0 for none",
    )


def set_up(threads: int | None = None) -> None:
    """Set the number of torch's threads if it is given, and show progress bars for downloads, but not for loading."""
    import torch
    import transformers
    from huggingface_hub.utils import enable_progress_bars

    if threads is not None:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()  # this also hides the Hub's progress bars
    enable_progress_bars()


def load_models(options: argparse.Namespace, is_drafted: bool = False) -> Pair:
    """Load the models that the flags of [`add_models`] name, ready to generate.

    If no drafter is given and there is none next to the target, token recycling drafts, unless `is_drafted` requires a
    drafter with weights.
    """
    from hf_domino.pair import NO_DRAFTER, choose_dtype, load_pair
    from hf_domino.publishing.released import known_drafters

    device = options.device or default_device()
    trust = options.trust_remote_code
    dtype = choose_dtype(options.dtype, device, options.target, trust)
    set_up(options.threads)
    name = str(dtype).removeprefix("torch.")
    print(f"loading {options.target or 'the bundled pair'} in {name} on {device}", file=sys.stderr)
    pair = load_pair(
        options.target,
        options.drafter,
        dtype=dtype,
        device=device,
        is_drafted=is_drafted,
        chat_template_kwargs=options.chat_template_kwargs,
        trust_remote_code=trust,
    )
    say_if_busy(device, options.threads)
    if pair.drafter is None:
        pair = pair.recycled()
        print(known_drafters(options.target or "") or NO_DRAFTER, file=sys.stderr)
    return pair


def say_if_busy(device: str, threads: int | None) -> None:
    """Print what to do if other programs disturb the threads of a command on a CPU."""
    if device == "cpu" and threads is None and (hint := busy_hint(load_per_core())):
        print(hint, file=sys.stderr)


def choice_of(options: argparse.Namespace) -> dict[str, Any]:
    """Turn the flags of [`add_choice`] into arguments of `generate`, and set the seed."""
    sampling = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p")}
    given = {name: value for name, value in sampling.items() if value is not None}
    is_greedy = options.temperature == 0
    if is_greedy and len(given) > 1:
        raise ValueError("--top-k and --top-p must be left out with --temperature 0, which does not sample.")
    import torch

    if options.seed is not None:
        torch.manual_seed(options.seed)
    arguments: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "prompt_lookup_num_tokens": options.lookup_tokens or None,
    }
    if is_greedy:
        arguments["do_sample"] = False
    elif given:
        arguments |= {"do_sample": True} | given
    return arguments


def default_device() -> str:
    """Return the device for a command without `--device`: a GPU if torch can use one, otherwise the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"

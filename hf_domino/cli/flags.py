"""Define the flags that several commands share, without a slow import, as in all modules of commands.

If a module that needs torch defines the allowed values of a flag, they are repeated here, and a test compares the two.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_domino._common.dtypes import DTYPES, dtype_name, dtype_of
from hf_domino._common.fields import MOST_SEED

if TYPE_CHECKING:
    from hf_domino.pair import Pair

DTYPE: Any = {"type": dtype_name, "choices": DTYPES}  # arguments of add_argument for --dtype
ENGINE_NAMES = ("sglang", "vllm", "dflash")
FORMATS = ("specforge", "speculators")


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Make a function that reads a flag in this range, and whose errors argparse reports."""
    expected = f"of at least {least}" if most == math.inf else f"in [{least}, {most}]"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number {expected}, got {text!r}")
        return value

    return read


positive_int = whole_number(1)
thread_count = whole_number(1, 1024)  # torch starts as many threads as it is told to


def add_models(group: argparse._ArgumentGroup, measures: bool = False, is_drafted: bool = False) -> None:
    """Add flags for a target, its drafter, their device and dtype, which [`load_models`] reads.

    A command that `measures` takes several drafters, and computes in fp32 by default. One with `is_drafted` needs a
    drafter with weights.
    """
    dtype = None
    dtype_help = " (default: bfloat16 on a GPU, else float32)"
    action = "store"
    drafter_help = ""
    if measures:
        dtype = "float32"
        dtype_help = ""
        action = "append"
        drafter_help = "; repeat the flag to compare several drafters"
    add = group.add_argument
    add("--target", help="folder or Hub name of the target (default: the bundled one)")
    names = "folder or Hub name of the drafter"
    beside = "NAME-domino beside the target"
    if not is_drafted:
        names += ", or recycling (token recycling, which needs no training)"
        beside += ", else recycling"
    add("--drafter", action=action, help=f"{names} (default: {beside}){drafter_help}")
    add("--dtype", **DTYPE, default=dtype, help=f"dtype of all models{dtype_help}")
    add("--device", help="device of all models (default: cuda where there is a GPU, else cpu)")
    add("--threads", type=thread_count, help="CPU threads of torch (default: as torch chooses)")


def add_choice(group: argparse._ArgumentGroup, max_new_tokens: int) -> None:
    """Add flags for how tokens are chosen, which [`choice_of`] reads; the target's configuration decides the rest."""
    group.add_argument("--max-new-tokens", type=positive_int, default=max_new_tokens, help="most tokens of an answer")
    group.add_argument(
        "--temperature",
        type=float,
        help="sample at this temperature, 0 is greedy (default: the target's own way)",
    )
    seed = whole_number(0, MOST_SEED)
    group.add_argument("--seed", type=seed, help="of what is sampled: the same seed writes the same text")
    group.add_argument(
        "--lookup-tokens",
        type=positive_int,
        metavar="N",
        help="let rounds propose up to N tokens that followed the same words earlier in the text (prompt lookup)",
    )


def set_up(threads: int | None = None) -> None:
    """Set torch's threads, if given, and show progress bars for downloads but not for reading files."""
    import torch
    import transformers
    from huggingface_hub.utils import enable_progress_bars

    if threads is not None:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()  # this also hides those of the Hub
    enable_progress_bars()


def load_models(options: argparse.Namespace, is_drafted: bool = False) -> Pair:
    """Load the models that the flags of [`add_models`] name, ready to generate.

    If no drafter is given and there is none beside the target, token recycling drafts, except where `is_drafted` asks
    for a drafter of its own.
    """
    from hf_domino.pair import NO_DRAFTER, check_device, load_pair

    device = options.device or default_device()
    check_device(device)
    set_up(options.threads)
    default = "float32" if device == "cpu" else "bfloat16"
    dtype = options.dtype or default
    print(f"loading {options.target or 'the bundled pair'} in {dtype} on {device}", file=sys.stderr)
    pair = load_pair(options.target, options.drafter, dtype=dtype_of(dtype), device=device, is_drafted=is_drafted)
    if pair.drafter is None:
        pair = pair.recycled()
        print(NO_DRAFTER, file=sys.stderr)
    return pair


def choice_of(options: argparse.Namespace) -> dict[str, Any]:
    """Turn the flags of [`add_choice`] into arguments of `generate`, and set the seed."""
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        raise ValueError(f"--temperature must be at least 0 and finite, got {options.temperature}.")
    import torch

    if options.seed is not None:
        torch.manual_seed(options.seed)
    arguments: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "prompt_lookup_num_tokens": options.lookup_tokens,
    }
    if options.temperature is not None:
        arguments["do_sample"] = options.temperature > 0
    if options.temperature:
        arguments["temperature"] = options.temperature
    return arguments


def default_device() -> str:
    """Return the device of a command without `--device`, a GPU if torch can use one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"

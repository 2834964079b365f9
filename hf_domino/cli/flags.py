"""Flags that several commands share. Like all modules of commands it imports nothing that takes a moment.

What a flag may be is spelled out where its home needs torch; a test compares the two.
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

DTYPE: Any = {"type": dtype_name, "choices": DTYPES}  # how --dtype is read
ENGINE_NAMES = ("sglang", "vllm", "dflash")
FORMATS = ("specforge", "speculators")


def whole_number(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Make the reader of a flag that must be in this range; argparse reports what it raises."""
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
thread_count = whole_number(1, 1024)  # torch starts as many


def add_models(group: argparse._ArgumentGroup, measures: bool = False) -> None:
    """Add a target, its drafter, and where and how they compute, for [`load_models`]; measured are several, in fp32."""
    dtype, dtype_help = ("float32", "") if measures else (None, " (default: bfloat16 on a GPU, else float32)")
    again, again_help = ("append", "; given again, drafters of any kind are compared") if measures else ("store", "")
    add = group.add_argument
    add("--target", help="folder or Hub name of the target (default: the bundled one)")
    beside = "default: NAME-domino beside the target"
    add("--drafter", action=again, help=f"folder or Hub name of the drafter ({beside}){again_help}")
    add("--dtype", **DTYPE, default=dtype, help=f"dtype of all models{dtype_help}")
    add("--device", help="device of all models (default: cuda where there is a GPU, else cpu)")
    add("--threads", type=thread_count, help="CPU threads of torch (default: as torch chooses)")


def add_choice(group: argparse._ArgumentGroup, max_new_tokens: int) -> None:
    """Add how tokens are chosen, for [`choice_of`]; the rest is up to the target's configuration."""
    group.add_argument("--max-new-tokens", type=positive_int, default=max_new_tokens, help="most tokens of an answer")
    group.add_argument(
        "--temperature",
        type=float,
        help="sample at this temperature, 0 is greedy (default: the target's own way)",
    )
    seed = whole_number(0, MOST_SEED)
    group.add_argument("--seed", type=seed, help="of what is sampled: the same seed writes the same text")
    group.add_argument(
        "--lookup-tokens", type=positive_int, metavar="N", help="let rounds copy up to N tokens from the text so far"
    )


def set_up(threads: int | None = None) -> None:
    """Set torch's threads, if given, and show progress of downloads, not of reading files."""
    import torch
    import transformers
    from huggingface_hub.utils import enable_progress_bars

    if threads is not None:
        torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()  # the Hub's, too
    enable_progress_bars()


def load_models(options: argparse.Namespace) -> Pair:
    """Load what [`add_models`] names, ready to generate."""
    from hf_domino.pair import check_device, load_pair

    device = options.device or default_device()
    check_device(device)
    set_up(options.threads)
    dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
    print(f"loading {options.target or 'the bundled pair'} in {dtype} on {device}", file=sys.stderr)
    return load_pair(options.target, options.drafter, dtype=dtype_of(dtype), device=device)


def choice_of(options: argparse.Namespace) -> dict[str, Any]:
    """Turn the flags of [`add_choice`] into arguments of `generate`, and set the seed."""
    if options.temperature is not None and not 0 <= options.temperature < math.inf:
        raise ValueError(f"--temperature must be at least 0 and finite, got {options.temperature}.")
    import torch

    if options.seed is not None:
        torch.manual_seed(options.seed)
    arguments = {"max_new_tokens": options.max_new_tokens, "prompt_lookup_num_tokens": options.lookup_tokens}
    if not options.temperature:
        return arguments | ({} if options.temperature is None else {"do_sample": False})
    return arguments | {"do_sample": True, "temperature": options.temperature}


def default_device() -> str:
    """Return the device of a command without `--device`: a GPU where torch can use one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"

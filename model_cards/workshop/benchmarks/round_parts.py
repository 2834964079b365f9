"""What a steady round consists of: operations dispatched in each phase, and the package's functions and files.

    python model_cards/workshop/benchmarks/round_parts.py
    python model_cards/workshop/benchmarks/round_parts.py --method eagle3 --tree-size 16 --batch-size 4
    python model_cards/workshop/benchmarks/round_parts.py --functions   # names the functions

On a small model, a round takes about as long as dispatching its operations. Counts do not depend on the machine or on
how busy it is, so they show what a change costs before anything is timed. Models are tiny and have random weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

import hf_domino
from hf_domino.decoding.loop import Generation
from hf_domino.stats.phases import PHASES

PACKAGE = Path(hf_domino.__file__).parent
TARGET = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
DRAFTER = {"num_hidden_layers": 2, "mask_token_id": 3, "draft_length": "full"}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 0},
    "top-k": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
}


class Operations(TorchDispatchMode):
    """Counts the operations that are dispatched inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def clock(self) -> float:
        """The number of operations so far, for whoever asks for the time."""
        return float(self.count)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Functions:
    """Notes the package's functions that each round calls."""

    def __init__(self) -> None:
        self.rounds: list[Counter[tuple[str, str]]] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of `sys.setprofile`."""
        if event != "call":
            return
        code = frame.f_code
        if code is Generation.run_round.__code__:
            self.rounds.append(Counter())
        path = Path(code.co_filename)
        if self.rounds and not code.co_name.startswith("<") and path.is_relative_to(PACKAGE):
            self.rounds[-1][str(path.relative_to(PACKAGE)), code.co_qualname] += 1

    @property
    def steady(self) -> Counter[tuple[str, str]]:
        """The functions of the round in the middle."""
        return self.rounds[len(self.rounds) // 2]


def count(options: argparse.Namespace, sampling: str) -> tuple[dict[str, float], Counter[tuple[str, str]]]:
    """Count the operations of an average round by phase, and the calls of a steady round by function.

    Args:
        options (`Namespace`): The flags of the command.
        sampling (`str`): One of `SAMPLING`.
    """
    torch.manual_seed(options.seed)
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2}
    target = Qwen3ForCausalLM(Qwen3Config(**TARGET, **tokens)).eval()
    if options.method == "recycling":
        drafter = hf_domino.recycling(target, draft_length="full", draft_tree_size=options.tree_size)
    else:
        fields = DRAFTER | {"projector_type": options.method, "block_size": options.block_size}
        fields["draft_tree_size"] = options.tree_size
        method = hf_domino.methods.METHODS[options.method].config_class
        for name in (*method.unread, *method.fixed):
            fields.pop(name, None)
        drafter = hf_domino.DominoDraftModel(hf_domino.DominoConfig.for_target(target.config, **fields)).eval()
    prompt = torch.randint(4, TARGET["vocab_size"], (options.batch_size, 16))
    call = SAMPLING[sampling] | {"attention_mask": torch.ones_like(prompt), "max_new_tokens": options.num_tokens}
    if options.fixed:
        call["cache_implementation"] = "static"
    operations = Operations()
    functions = Functions()
    # Phases are timed by a clock that advances with every operation.
    with operations, hf_domino.timed_phases(), mock.patch.object(time, "perf_counter", operations.clock):
        target.generate(prompt, assistant_model=drafter, **call)
    num_rounds = max(len(lengths) for lengths in drafter.stats.rows)
    counted = drafter.stats.phases
    assert counted is not None, "phases are timed"
    phases = {name: number / num_rounds for name, number in counted.items()}
    before = sys.getprofile()
    sys.setprofile(functions)
    try:
        target.generate(prompt, assistant_model=drafter, **call)
    finally:
        sys.setprofile(before)
    return phases, functions.steady


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the flags of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--method", choices=sorted(hf_domino.methods.METHODS), default="domino", help="how the drafter drafts")
    add("--block-size", type=int, default=8, help="positions of a block")
    add("--tree-size", type=int, metavar="N", help="rounds verify trees of N nodes (default: chains)")
    add("--batch-size", type=int, default=1, help="sequences at once")
    add("--fixed", action="store_true", help="use caches of fixed shape")
    add("--functions", action="store_true", help="list the functions of a greedy round")
    add("--num-tokens", type=int, default=40, metavar="N", help="tokens that a sequence generates")
    add("--seed", type=int, default=0, help="seed of weights and prompt")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the parts of a round.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line, defaults to `sys.argv[1:]`.
    """
    options = parsed(arguments)
    torch.set_num_threads(1)
    print("".join(f"{name:>16}" for name in ("operations of", *PHASES, "all", "functions", "files", "calls")))
    for sampling in SAMPLING:
        phases, functions = count(options, sampling)
        files = {file for file, _ in functions}
        counts = [*phases.values(), sum(phases.values()), len(functions), len(files), functions.total()]
        print(f"{sampling:>16}" + "".join(f"{value:>16.0f}" for value in counts))
        if options.functions and sampling == "greedy":
            print("\n".join(f"{number:>4} {file}: {name}" for (file, name), number in sorted(functions.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Milliseconds of a whole round, with random weights of a chosen size, against their floor.

    python model_cards/workshop/benchmarks/rounds.py                                      # Qwen3-8B's sizes, on a GPU
    python model_cards/workshop/benchmarks/rounds.py --batch-size 8                       # eight sequences at once
    python model_cards/workshop/benchmarks/rounds.py --drafter recycling --tree-size 32   # token recycling
    python model_cards/workshop/benchmarks/rounds.py --shapes tiny --dtype float32        # on a CPU too

Random weights accept next to nothing, and a round costs the same whatever it accepts. Token recycling begins each text
with an empty table. The same greedy text is generated
with stages as CUDA graphs, with the large ones compiled before that, with the same stages launched kernel by kernel,
and with caches that grow; and by the target alone, whose step is a round of one token, and which Transformers compiles
where its cache is static. Beside them stands the floor: the bytes of all weights a round reads over the bandwidth that
a copy reaches on this device.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import hf_domino
from hf_domino._common.atomic_writes import check_writable, write_atomic
from hf_domino._common.dtypes import dtype_of
from hf_domino._common.provenance import provenance
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.decoding.static.graphs import without_graphs
from hf_domino.decoding.static.workspace import release_workspaces
from hf_domino.evaluation.benchmark.timing import timed
from hf_domino.evaluation.results import Result, to_lines
from hf_domino.formats.source import RECYCLING
from hf_domino.methods import DominoDraftModel

SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of target and drafter
    "qwen3-8b": (
        {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6},
        {"num_hidden_layers": 5, "block_size": 16, "mask_token_id": 151669, "emb_dim": 256, "gru_hidden_dim": 1024},
    ),
    "tiny": (
        {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        {"num_hidden_layers": 2, "block_size": 16, "mask_token_id": 3, "emb_dim": 16, "gru_hidden_dim": 32},
    ),
}
ALONE, ALONE_COMPILED = TARGET_ALONE = "target alone", "target alone, compiled"
GRAPHED, COMPILED, LAUNCHED = "static, graphs", "static, compiled", "static, launched"
ON_GPU = GRAPHED, COMPILED, ALONE_COMPILED
METHODS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager], dict[str, Any]]] = {
    GRAPHED: (contextlib.nullcontext, {"cache_implementation": "static", "disable_compile": True}),
    COMPILED: (contextlib.nullcontext, {"cache_implementation": "static"}),
    LAUNCHED: (without_graphs, {"cache_implementation": "static", "disable_compile": True}),
    "dynamic": (contextlib.nullcontext, {"cache_implementation": "dynamic"}),
    ALONE: (contextlib.nullcontext, {}),
    ALONE_COMPILED: (contextlib.nullcontext, {"cache_implementation": "static"}),
}
DRAFTERS = ("domino", RECYCLING)
FEW_ROUNDS = 4  # of the text that is subtracted
COPY_BYTES = 2**30


def measure_rounds(options: argparse.Namespace) -> list[Result]:
    """Measure all methods in turn; one row each, with its floor and where it comes from.

    Args:
        options (`Namespace`): The flags of the command.
    """
    device, num_rounds = torch.device(options.device), options.rounds
    torch.manual_seed(options.seed)
    target, drafter = random_models(options.shapes, dtype_of(options.dtype), options.device, options.drafter)
    drafter = drafter.view(draft_tree_size=options.tree_size)
    prompt = torch.randint(4, target.config.vocab_size, (options.batch_size, options.context), device=device)
    methods = [method for method in options.methods if method not in ON_GPU or device.type == "cuda"]
    times: dict[str, list[float]] = {method: [] for method in methods}
    texts, first = {}, {}
    for method in tqdm(methods, "first texts"):  # the first texts allocate, compile and capture, and do not count
        _, first[method] = timed(device, partial(_time_rounds, target, drafter, prompt, method, num_rounds))
    print(f"first texts took {sum(first.values()):.0f} s", file=sys.stderr)
    turns = contextlib.nullcontext() if options.turns is None else FileLock(options.turns)
    with turns:
        for _ in tqdm(range(options.repeats), "repeats"):
            for method in methods:
                texts[method], time_per_round = _time_rounds(target, drafter, prompt, method, num_rounds)
                times[method].append(time_per_round)
        bandwidth = copy_bandwidth(device)
    release_workspaces()
    fields = ("shapes", "drafter", "context", "rounds", "tree_size", "dtype", "seed", "batch_size", "repeats")
    settings = {name: getattr(options, name) for name in fields}
    made = provenance(options.device)
    rows = []
    for method, elapsed in times.items():
        num_bytes = weight_bytes(target)
        if method not in TARGET_ALONE and not drafter.config.learns_while_drafting:  # of a table, it reads a few rows
            num_bytes += weight_bytes(drafter) + target.get_output_embeddings().weight.nbytes
        figures = {
            "ms": statistics.median(elapsed),
            "ms_least": min(elapsed),
            "ms_most": max(elapsed),
            "first_s": first[method],
            "floor_ms": 1e3 * num_bytes / bandwidth,
            "bytes": num_bytes,
            "bandwidth": bandwidth,
            "is_equal": torch.equal(texts[method], texts.get(LAUNCHED, texts[methods[0]])),
        }
        rows.append(Result(method, settings, figures, made))
    return rows


def table(rows: Sequence[Result]) -> str:
    """Rows for a terminal."""
    lines = [f"{'ms a round':<24}{'median':>9}{'least':>9}{'most':>9}{'floor':>9}{'over floor':>12}"]
    for row in rows:
        times = "".join(f"{row[name]:>9.3f}" for name in ("ms", "ms_least", "ms_most", "floor_ms"))
        lines.append(f"{row.method:<24}{times}{row['ms'] / row['floor_ms']:>11.2f}x")
    lines.append("floor: bytes of the weights that a round reads over the bandwidth of a copy on this device")
    return "\n".join(lines)


def random_models(
    shapes: str, dtype: torch.dtype, device: str, method: str = DRAFTERS[0]
) -> tuple[PreTrainedModel, DominoDraftModel]:
    """A target and a drafter with random weights, by the name of their shapes in `SHAPES`; or with an empty table."""
    target_sizes, drafter_sizes = SHAPES[shapes]
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            target = Qwen3ForCausalLM(Qwen3Config(**target_sizes, **tokens)).eval()
            if method != RECYCLING:
                config = DominoConfig.for_target(target.config, **drafter_sizes, draft_length="full")
                return target, DominoDraftModel(config).eval()
    finally:
        torch.set_default_dtype(default)
    return target, hf_domino.recycling(target, draft_length="full")


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights but the embeddings, of which a round reads a few rows."""
    skipped = model.get_input_embeddings().weight if isinstance(model, Qwen3ForCausalLM) else None
    return sum(weight.nbytes for weight in model.parameters() if weight is not skipped)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, that copying a large buffer reaches; the best of a few."""
    source = torch.zeros(COPY_BYTES if device.type == "cuda" else COPY_BYTES // 16, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * source.numel() / min(timed(device, lambda: copy.copy_(source))[1] for _ in range(8))


def _time_rounds(
    target: PreTrainedModel, drafter: DominoDraftModel, prompt: torch.Tensor, method: str, num_rounds: int
) -> tuple[torch.Tensor, float]:
    """A text of one method and the milliseconds of a round: a longer text less a shorter one, prompt and all."""
    context, options = METHODS[method]
    is_alone = method in TARGET_ALONE
    call = options | {"attention_mask": torch.ones_like(prompt), "do_sample": False}
    if not is_alone:
        call["assistant_model"] = drafter
    found = []
    for count in (num_rounds, FEW_ROUNDS):  # the longer first, whose buffers and graphs the shorter takes
        if drafter.config.learns_while_drafting:
            drafter.forget()
        with context():
            text, seconds = timed(prompt.device, partial(target.generate, prompt, max_new_tokens=count + 1, **call))
        found.append((text, seconds, count if is_alone else max(map(len, drafter.stats.rows))))
    (text, long, rounds), (_, short, few) = found
    return text, 1e3 * (long - short) / (rounds - few)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure rounds, write their rows and print them; returns 1 where a graph gives another text than its launches.

    Args:
        arguments (`Sequence[str]`, *optional*): Command line, defaults to `sys.argv[1:]`.
    """
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", choices=SHAPES, default="qwen3-8b" if on_gpu else "tiny", help="sizes of both models")
    add("--drafter", choices=DRAFTERS, default=DRAFTERS[0], help="what drafts (default: a Domino drafter)")
    add("--batch-size", type=int, default=1, help="sequences at once")
    add("--context", type=int, default=512, help="tokens of the prompt")
    add("--tree-size", type=int, metavar="N", help="rounds verify trees of N nodes (default: chains)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="what to measure (default: all)")
    add("--rounds", type=int, default=64, help=f"rounds of a text, 16 at least; {FEW_ROUNDS} of another are subtracted")
    add("--repeats", type=int, default=5, help="texts per method; the median counts")
    add("--turns", type=Path, help="file by which commands beside each other take turns at timing")
    add("--dtype", default="bfloat16" if on_gpu else "float32", help="dtype of both models")
    add("--device", default="cuda" if on_gpu else "cpu", help="device of both models")
    add("--seed", type=int, default=0, help="seed of weights and prompt")
    add("--results", type=Path, default=Path("rounds.jsonl"), help="where rows are written")
    options = parser.parse_args(arguments)
    if options.rounds < 4 * FEW_ROUNDS:
        parser.error(f"--rounds must be at least {4 * FEW_ROUNDS}, got {options.rounds}")
    check_writable(options.results.parent, "the folder of --results")
    rows = measure_rounds(options)
    write_atomic(options.results, to_lines(rows))
    print(table(rows))
    return 0 if rows[0]["is_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""What the benchmarks of this folder share: sizes, timing under CUDA graphs, verification, rows and a table.

Every case is run by Triton and by its PyTorch reference. What was computed while timing is checked; a wrong result
ends the script. The head's sizes are those of the Qwen3-8B drafter, its weights random.

Shapes: B rows, P proposals, L branches, V vocabulary, M candidates, R low rank, H width of embeddings, G width of the
state.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

import domino_kernels
from domino_kernels.dispatch import has_triton

if TYPE_CHECKING:
    from hf_domino.evaluation.results import Result

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, for --dry-run

Outputs = tuple[torch.Tensor, ...]
MAX_TIE_ULPS = 2  # another order of summation tips a rounding over, in the worst case for both tokens compared
STATE_ULPS = 4  # PyTorch rounds the gates as well as the state, the kernel the state alone
MIN_STATE_TOLERANCE = 1e-5  # fp32: thousands of terms in another order
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Sizes:
    """Sizes of a correction head; by default those of the Qwen3-8B drafter.

    Args:
        hidden_size (`int`, *optional*, defaults to 4096): Width of embeddings (H).
        state_size (`int`, *optional*, defaults to 1024): Width of the prefix state (G).
        rank (`int`, *optional*, defaults to 256): Low rank (R).
        vocab_size (`int`, *optional*, defaults to 151936): Vocabulary (V).
        pool_size (`int`, *optional*, defaults to 128): Candidates per position (M).
        num_draft_tokens (`int`, *optional*, defaults to 16): Proposals (P).
        num_branches (`int`, *optional*, defaults to 8): Branches of a tree (L).
    """

    hidden_size: int = 4096
    state_size: int = 1024
    rank: int = 256
    vocab_size: int = 151936
    pool_size: int = 128
    num_draft_tokens: int = 16
    num_branches: int = 8


TINY = Sizes(hidden_size=24, state_size=12, rank=8, vocab_size=200, pool_size=16, num_draft_tokens=3, num_branches=2)


class Head:
    """Random weights and inputs of a correction head; corrections come out as large as the base logits.

    Args:
        options (`argparse.Namespace`): Flags of [`parse`].
    """

    def __init__(self, options: argparse.Namespace):
        self.sizes = sizes = TINY if options.dry_run else Sizes()
        self.batch_size, self.device = options.batch_size, torch.device(options.device)
        self.dtype = getattr(torch, options.dtype)
        self.generator = torch.Generator(self.device).manual_seed(options.seed)
        self.embedding = self.random(sizes.vocab_size, sizes.hidden_size)  # [V, H]
        self.weight_ih = self.random(3 * sizes.state_size, sizes.hidden_size, scale=sizes.hidden_size**-0.5)
        self.weight_hh = self.random(3 * sizes.state_size, sizes.state_size, scale=sizes.state_size**-0.5)
        self.weight_state = self.random(sizes.rank, sizes.state_size, scale=2 * sizes.state_size**-0.5)  # [R, G]
        self.up_weight = self.random(sizes.vocab_size, sizes.rank, scale=8 * sizes.rank**-0.5)  # [V, R]
        self.tokens = torch.randint(
            sizes.vocab_size, (self.batch_size,), generator=self.generator, device=self.device
        )  # [B]
        self.state = self.random(self.batch_size, sizes.state_size).tanh()  # [B, G]
        self.block_part = self.random(self.batch_size, sizes.num_draft_tokens, sizes.rank)  # [B, P, R]
        self.base_logits = 4 * self.random(self.batch_size, sizes.num_draft_tokens, sizes.vocab_size).float()

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers of a shape, in the head's dtype."""
        return scale * torch.randn(shape, generator=self.generator, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Args:
        name (`str`): Its name in table and rows.
        run (`Callable`): Computes it; without arguments, and without a synchronisation.
        check (`Callable`): Raises an `AssertionError` if the outputs of `run` are wrong.
        bytes_read (`int`): What it must at least read from memory.
    """

    name: str
    run: Callable[[], Outputs]
    check: Callable[[Outputs], None]
    bytes_read: int


def num_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of some tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_choice(ids: torch.Tensor, base_logits: torch.Tensor, low_rank: torch.Tensor, up_weight: torch.Tensor) -> None:
    """Check that ids `[B]` have the largest corrected logit `[B, V]`, up to ties of `MAX_TIE_ULPS`."""
    correction = F.silu(low_rank).to(torch.float64) @ up_weight.to(torch.float64).T
    exact = base_logits.to(torch.float64) + correction
    missing = exact.amax(dim=1) - exact.gather(1, ids[:, None])[:, 0]
    scale = torch.maximum(exact.abs().amax(dim=1), correction.abs().amax(dim=1))
    tolerance = MAX_TIE_ULPS * torch.finfo(up_weight.dtype).eps * scale
    assert torch.all(missing <= tolerance), f"ids {ids.tolist()} miss the largest logit by {missing.tolist()}"


def check_state(state: torch.Tensor, expected: torch.Tensor) -> None:
    """Check a prefix state `[B, G]` against that of the reference."""
    tolerance = max(MIN_STATE_TOLERANCE, STATE_ULPS * torch.finfo(state.dtype).eps)
    torch.testing.assert_close(state, expected, atol=tolerance, rtol=0)


def parse(description: str | None) -> argparse.Namespace:
    """Read the flags that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the weights")
    parser.add_argument("--batch-size", type=int, default=1, help="rows")
    parser.add_argument("--repeats", type=int, default=200, help="timed runs; the median counts")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and inputs")
    parser.add_argument("--results", type=Path, help="append rows to this JSONL file")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, once, also without a GPU")
    options = parser.parse_args()
    if not (torch.cuda.is_available() or options.dry_run):
        parser.error("no CUDA device found; --dry-run shows on a CPU that everything runs")
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.dry_run:
        options.repeats = 1
    return options


def run(kernel: str, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Time and verify cases by Triton and by PyTorch, print a table and append rows.

    Args:
        kernel (`str`): What the cases are about.
        cases (`Sequence[Case]`): What to time.
        options (`argparse.Namespace`): Flags of [`parse`].
    """
    from hf_domino.evaluation.results import append_results  # imports Triton

    rows = list(_measure(kernel, cases, options))
    print(f"| {kernel} | implementation | median ms | p90 ms | GB/s |\n|---|---|---:|---:|---:|")
    for row in rows:
        times = " | ".join(f"{row[field]:.4f}" for field in ("median_ms", "p90_ms"))
        print(f"| {row['case']} | {row.method} | {times} | {row['gigabytes_per_second']:.0f} |")
    if options.results:
        append_results(options.results, rows)


def _measure(kernel: str, cases: Sequence[Case], options: argparse.Namespace) -> Iterator[Result]:
    from hf_domino._common.provenance import provenance
    from hf_domino.evaluation.results import Result

    settings = {name: getattr(options, name) for name in ("batch_size", "dtype", "repeats", "seed", "dry_run")}
    settings |= {"kernel": kernel, **asdict(TINY if options.dry_run else Sizes())}
    triton = importlib.metadata.version("triton") if has_triton() else None
    made = provenance(options.device) | {"triton": triton}
    for case in cases:
        for implementation in ["reference", "triton"] if has_triton() else ["reference"]:
            with domino_kernels.use_backend(implementation), torch.inference_mode():
                outputs, milliseconds = _timed(case.run, options)
            with domino_kernels.use_backend("reference"), torch.inference_mode():
                case.check(outputs)
            median = statistics.median(milliseconds)
            figures = {
                "median_ms": median,
                "p90_ms": sorted(milliseconds)[int(0.9 * (len(milliseconds) - 1))],
                "bytes_read": case.bytes_read,
                "gigabytes_per_second": case.bytes_read / median / 1e6,
            }
            yield Result(implementation, {"case": case.name} | settings, figures, made)


def _timed(function: Callable[[], Outputs], options: argparse.Namespace) -> tuple[Outputs, list[float]]:
    """Outputs and milliseconds of every run; on a GPU of a captured graph, without what Python takes to launch."""
    if options.device == "cpu":
        start = time.perf_counter()
        return function(), [(time.perf_counter() - start) * 1e3]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are compiled and workspaces allocated
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(options.repeats)]
    for before, after in events:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return tuple(output.clone() for output in outputs), [before.elapsed_time(after) for before, after in events]

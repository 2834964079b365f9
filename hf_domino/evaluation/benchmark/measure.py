"""Measure all methods on a batch of prompts, in turn, so that a slow minute of the machine hits all of them alike.

Shapes: B batch, N new tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_domino.data.filters import distinct_ngram_ratio
from hf_domino.drafter.phases import timed_phases
from hf_domino.drafter.stats import DecodingStats
from hf_domino.evaluation.benchmark.methods import Arguments, drafter_in
from hf_domino.evaluation.benchmark.options import BASELINE, BenchOptions
from hf_domino.evaluation.benchmark.partings import partings, until_end
from hf_domino.evaluation.benchmark.prompts import encode, source
from hf_domino.evaluation.benchmark.rows import Row
from hf_domino.evaluation.benchmark.timing import generate_timed, streamed_rounds
from hf_domino.pair import Pair

WARM_UPS, WARM_UP_TOKENS = 2, 32


class _Run(NamedTuple):
    """One timed run of a method on a batch."""

    tokens: torch.Tensor  # [B, N]
    seconds: float
    first_token: float
    peak_memory: int | None


class Bench:
    """Measures batch after batch with the same methods, plain generation among them."""

    def __init__(self, pair: Pair, methods: Mapping[str, Arguments], options: BenchOptions):
        self.pair, self.methods, self.options = pair, methods, options
        # A table that fills while it generates has seen a text that is measured again.
        self._empty = [
            (drafter, deepcopy(drafter.state_dict()))
            for drafter in map(drafter_in, methods.values())
            if drafter is not None and drafter.config.kind.has_table
        ]
        self.modes = ["greedy"] + ["sample"] * (options.temperature > 0)

    def warm_up(self, batch: Sequence[dict[str, Any]]) -> None:
        """Run every method a few times."""
        inputs = self._inputs(batch)
        count = {"max_new_tokens": min(WARM_UP_TOKENS, self.options.max_new_tokens)}
        for mode in self.modes:
            for method in self.methods:
                for _ in range(WARM_UPS):
                    generate_timed(self.pair.target, inputs, **self._call(method, mode) | count)

    def measure(self, mode: str, index: int, batch: Sequence[dict[str, Any]]) -> list[Row]:
        """Measure all methods on one batch, in one mode (`"greedy"` or `"sample"`); one row per method."""
        inputs, seed = self._inputs(batch), self.options.seed + index
        runs: dict[str, list[_Run]] = {method: [] for method in self.methods}
        for _ in range(self.options.repeats):
            for method in self.methods:
                runs[method].append(self._run(inputs, self._call(method, mode), seed))
        about = {
            "mode": mode,
            "temperature": self.options.temperature if mode == "sample" else 0.0,
            "prompt": index,
            "sources": [source(prompt) for prompt in batch],
        }
        rows, expected = [], runs[BASELINE][0].tokens
        for method, found in runs.items():
            call = self._call(method, mode)
            torch.manual_seed(seed)
            row = {"method": method} | about | self._times(found) | self._rounds(inputs, call)
            others = [run.tokens for run in found if not torch.equal(run.tokens, expected)]
            row["equals_plain"] = not others
            if others and drafter_in(call) is not None:
                plain = self._call(BASELINE, mode)
                row["partings"] = partings(self.pair.target, inputs, others[0], seed, **plain)
            rows.append(row)
        return rows

    def _inputs(self, batch: Sequence[dict[str, Any]]) -> Any:
        return encode(self.pair.tokenizer, batch).to(self.pair.target.device)

    def _call(self, method: str, mode: str) -> Arguments:
        choice: Arguments = {"do_sample": False}
        if mode == "sample":
            choice = {"do_sample": True, "temperature": self.options.temperature, "top_k": 0, "top_p": 1.0}
        return self.methods[method] | choice | {"max_new_tokens": self.options.max_new_tokens}

    def _run(self, inputs: Any, call: Arguments, seed: int) -> _Run:
        self._empty_tables()
        target, on_gpu = self.pair.target, self.pair.target.device.type == "cuda"
        torch.manual_seed(seed)
        _, first_token = generate_timed(target, inputs, **call | {"max_new_tokens": 1})
        torch.manual_seed(seed)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(target.device)
            models = [target, *(value for value in call.values() if isinstance(value, nn.Module))]
            weights = {weight.data_ptr(): weight.nbytes for model in models for weight in model.parameters()}
            others = torch.cuda.memory_allocated(target.device) - sum(weights.values())
        # On a CPU a phase is two readings of the clock, microseconds a round; events on a GPU have a run of their own.
        with nullcontext() if on_gpu else timed_phases():
            tokens, seconds = generate_timed(target, inputs, **call)
        # On a CPU an allocator keeps the memory of earlier calls.
        peak = torch.cuda.max_memory_allocated(target.device) - others if on_gpu else None
        return _Run(tokens, seconds, first_token, peak)

    def _empty_tables(self) -> None:
        for drafter, state in self._empty:
            drafter.load_state_dict(state)

    def _times(self, runs: Sequence[_Run]) -> Row:
        end_of_text = self.pair.target.generation_config.eos_token_id
        texts = [until_end(row, end_of_text) for row in runs[-1].tokens.tolist()]
        count, longest = sum(map(len, texts)), max(map(len, texts))
        seconds, first = (statistics.median(getattr(run, name) for run in runs) for name in ("seconds", "first_token"))
        return {
            "new_tokens": count,
            "seconds": seconds,
            "seconds_each": [run.seconds for run in runs],
            "tokens_per_second": count / seconds,
            "ttft_seconds": first,
            "tpot_seconds": (seconds - first) / (longest - 1) if longest > 1 else None,
            "peak_memory_bytes": max((run.peak_memory for run in runs if run.peak_memory is not None), default=None),
            "distinct_4gram": statistics.fmean(map(distinct_ngram_ratio, texts)),
        }

    def _rounds(self, inputs: Any, call: Arguments) -> Row:
        """Acceptance and the time in a round; where the last timed run does not say, from another one."""
        phases, loops = None, 0
        if (drafter := drafter_in(call)) is not None:
            if drafter.stats.phases is None:
                self._empty_tables()
                with timed_phases():
                    self.pair.target.generate(**inputs, **call)
            stats = drafter.stats
            phases, loops = stats.phases, max(map(len, stats.rows))
        elif call.keys() & {"prompt_lookup_num_tokens", "assistant_model", "use_mtp"}:
            lengths = streamed_rounds(self.pair.target, inputs, **call)
            stats = DecodingStats(max(lengths, default=1) - 1, rows=[lengths])
        else:
            stats = DecodingStats(0)
        return {
            "num_rounds": stats.num_rounds,
            "num_drafted": stats.num_drafted,
            "num_copied": stats.num_copied,
            "proposal_length": stats.proposal_length if stats.proposed and stats.num_drafted else None,
            "copied_length": stats.copied_length if stats.num_copied else None,
            "acceptance_length": stats.acceptance_length if stats.num_drafted else None,
            "tokens_per_forward": stats.tokens_per_forward if stats.num_rounds else None,
            "acceptance_rate_at": stats.acceptance_rate_at or None,
            "ms_per_round": {name: 1000 * s / loops for name, s in phases.items()} if phases and loops else None,
        }

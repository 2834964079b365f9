"""Measure all methods on a batch of prompts, in turn, so that a slow minute of the machine hits all of them alike.

Shapes: B batch, N new tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_domino.data.filters import distinct_ngram_ratio
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.phases import timed_phases
from hf_domino.drafter.stats import DecodingStats
from hf_domino.evaluation.benchmark.methods import BASELINE, Arguments, models_of
from hf_domino.evaluation.benchmark.prompts import encode, kind, source
from hf_domino.evaluation.benchmark.rows import Row
from hf_domino.evaluation.benchmark.timing import PeakMemory, first_token_seconds, generate_timed, streamed_rounds
from hf_domino.integration.drift.shadow import shadow
from hf_domino.pair import Pair

WARM_UPS, WARM_UP_TOKENS = 2, 32


@dataclass
class _Repeats:
    """The timed runs of one method on one batch."""

    seconds: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    peak_memory: list[int | None] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    stats: DecodingStats | None = None  # of the last one, if a drafter of ours took part


class Bench:
    """Measures batch after batch with the same methods, plain generation among them."""

    def __init__(self, pair: Pair, methods: Mapping[str, Arguments], options: argparse.Namespace):
        self.pair, self.methods, self.options = pair, methods, options
        drafters = [arguments.get("assistant_model") for arguments in methods.values()]
        # What fills while it generates has seen a text that is measured again.
        self._unused = [
            (drafter, deepcopy(drafter.state_dict()))
            for drafter in drafters
            if isinstance(drafter, DominoDraftModel) and drafter.config.kind.has_table
        ]
        self.modes = ["greedy"] + ["sample"] * (options.temperature > 0)

    def warm_up(self, batch: Sequence[dict[str, Any]]) -> None:
        """Run every method a few times."""
        inputs, count = self._inputs(batch), min(WARM_UP_TOKENS, self.options.max_new_tokens)
        for mode in self.modes:
            for arguments in self.methods.values():
                for _ in range(WARM_UPS):
                    generate_timed(self.pair.target, inputs, **arguments, **self._law(mode), max_new_tokens=count)

    def measure(self, mode: str, index: int, batch: Sequence[dict[str, Any]]) -> list[Row]:
        """Measure all methods on one batch, in one mode (`"greedy"` or `"sample"`); one row per method."""
        inputs, law = self._inputs(batch), self._law(mode)
        runs = {method: _Repeats() for method in self.methods}
        for _ in range(self.options.repeats):
            for method in self.methods:
                self._time(runs[method], inputs, self._call(method, law), index)
        kinds = {kind(prompt) for prompt in batch}
        about = {
            "mode": mode,
            "temperature": law.get("temperature", 0.0),
            "prompt": index,
            "sources": [source(prompt) for prompt in batch],
            "kind": kinds.pop() if len(kinds) == 1 else None,
        }
        rows = []
        for method, repeats in runs.items():
            call = self._call(method, law)
            torch.manual_seed(self.options.seed + index)
            row = {"method": method} | about | self._times(repeats) | self._rounds(method, repeats, inputs, call)
            row["equals_plain"] = _all_equal(repeats.outputs, runs[BASELINE].outputs[0])
            if not row["equals_plain"] and isinstance(call.get("assistant_model"), DominoDraftModel):
                row["partings"] = self._partings(inputs, call, index)
            rows.append(row)
        return rows

    def _inputs(self, batch: Sequence[dict[str, Any]]) -> Any:
        return encode(self.pair.tokenizer, batch).to(self.pair.target.device)

    def _law(self, mode: str) -> Arguments:
        if mode == "greedy":
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.options.temperature, "top_k": 0, "top_p": 1.0}

    def _call(self, method: str, law: Arguments) -> Arguments:
        return self.methods[method] | law | {"max_new_tokens": self.options.max_new_tokens}

    def _time(self, repeats: _Repeats, inputs: Any, call: Arguments, index: int) -> None:
        self._empty_tables()
        target, memory = self.pair.target, PeakMemory(models_of(self.pair, call))
        torch.manual_seed(self.options.seed + index)
        repeats.first_token.append(first_token_seconds(target, inputs, **call))
        torch.manual_seed(self.options.seed + index)
        memory.start()
        # On a CPU a phase is two readings of the clock, microseconds a round; events on a GPU have a run of their own.
        with timed_phases() if target.device.type == "cpu" else nullcontext():
            tokens, seconds = generate_timed(target, inputs, **call)
        if isinstance(drafter := call.get("assistant_model"), DominoDraftModel):
            repeats.stats = drafter.stats
        repeats.peak_memory.append(memory.read())
        repeats.seconds.append(seconds)
        repeats.outputs.append(tokens)

    def _empty_tables(self) -> None:
        for drafter, state in self._unused:
            drafter.load_state_dict(state)

    def _partings(self, inputs: Any, call: Arguments, index: int) -> list[dict[str, Any]]:
        """Where texts part from what the target alone writes, and how near to a tie that is."""
        torch.manual_seed(self.options.seed + index)
        with shadow(share=1.0) as report:
            self.pair.target.generate(**inputs, **call)
        return [
            {
                "row": found.row,
                "position": found.position,
                "margin": found.margin if math.isfinite(found.margin) else None,
                "tie": found.tie,
            }
            for found in report.mismatches
        ]

    def _times(self, repeats: _Repeats) -> Row:
        texts = [
            until_end(row, self.pair.target.generation_config.eos_token_id) for row in repeats.outputs[-1].tolist()
        ]
        count, longest = sum(map(len, texts)), max(map(len, texts))
        seconds, first = statistics.median(repeats.seconds), statistics.median(repeats.first_token)
        peaks = [peak for peak in repeats.peak_memory if peak is not None]
        return {
            "new_tokens": count,
            "seconds": seconds,
            "seconds_each": repeats.seconds,
            "tokens_per_second": count / seconds,
            "ttft_seconds": first,
            "tpot_seconds": (seconds - first) / (longest - 1) if longest > 1 else None,
            "peak_memory_bytes": max(peaks) if peaks else None,
            "distinct_4gram": statistics.fmean(map(distinct_ngram_ratio, texts)),
        }

    def _rounds(self, method: str, repeats: _Repeats, inputs: Any, call: Arguments) -> Row:
        """Acceptance and the time in a round; where the timed runs do not say, from another one."""
        phases, loops, by_context = None, 0, None
        if (stats := repeats.stats) is not None:
            if stats.phases is None:
                self._empty_tables()
                with timed_phases():
                    self.pair.target.generate(**inputs, **call)
                stats = call["assistant_model"].stats
            phases, loops = stats.phases, max(map(len, stats.rows))
            by_context = stats.rounds_by_context(inputs["attention_mask"].sum(dim=1).add(1).tolist())
        elif self.methods[method].keys() - {"custom_generate"}:
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
            "rounds_by_context": by_context,
            "ms_per_round": {name: 1000 * s / loops for name, s in phases.items()} if phases and loops else None,
        }


def until_end(tokens: list[int], end_of_text: int | list[int] | None) -> list[int]:
    """A row of tokens up to its first end-of-text token, without the padding behind it."""
    ends = end_of_text if isinstance(end_of_text, list) else [end_of_text]
    return tokens[: next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))]


def _all_equal(outputs: Sequence[torch.Tensor], expected: torch.Tensor) -> bool:
    return all(torch.equal(output, expected) for output in outputs)

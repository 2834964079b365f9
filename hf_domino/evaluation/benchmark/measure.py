"""Measure all methods on a batch of prompts, in turn, so that a slow minute of the machine affects all of them alike.

Shapes: B batch, N new tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hf_domino._common.verdict import load_per_core
from hf_domino.configuration.from_target import eos_ids_of
from hf_domino.data.filters import distinct_ngram_ratio
from hf_domino.data.writers import cut_at_end
from hf_domino.evaluation.benchmark.divergences import find_divergences
from hf_domino.evaluation.benchmark.methods import Arguments, drafter_in
from hf_domino.evaluation.benchmark.options import BASELINE, FIRST_TOKEN, PACKED, PEAK_MEMORY, BenchOptions
from hf_domino.evaluation.benchmark.prompts import inputs_of, source
from hf_domino.evaluation.benchmark.timing import generate_timed, streamed_rounds
from hf_domino.evaluation.initial_state import InitialState
from hf_domino.evaluation.results import Result
from hf_domino.pair import Pair
from hf_domino.stats.decoding_stats import DecodingStats
from hf_domino.stats.phases import timed_phases

Figures = dict[str, Any]
WARM_UPS = 2
WARM_UP_TOKENS = 32


class Bench:
    """Measures one batch after the other with the same methods, one of which is plain generation."""

    def __init__(self, pair: Pair, methods: Mapping[str, Arguments], options: BenchOptions):
        self.pair = pair
        self.methods = methods
        self.options = options
        drafters = map(drafter_in, methods.values())
        self._initial = InitialState(drafter for drafter in drafters if drafter is not None)
        self.modes = ["greedy"]
        if options.temperature > 0:
            self.modes.append("sample")

    @property
    def runs_of_warm_up(self) -> int:
        """Number of runs of a warm-up."""
        return len(self.modes) * len(self.methods) * WARM_UPS

    def warm_up(self, batch: Sequence[dict[str, Any]], count_run: Callable[[], Any] = lambda: None) -> None:
        """Run every method a few times, and call `count_run` after each run."""
        inputs = inputs_of(self.pair, batch)
        count = {"max_new_tokens": min(WARM_UP_TOKENS, self.options.max_new_tokens)}
        for mode in self.modes:
            for method in self.methods:
                for _ in range(WARM_UPS):
                    generate_timed(self.pair.target, inputs, method == PACKED, **self._call(method, mode) | count)
                    count_run()

    def measure(
        self, mode: str, index: int, batch: Sequence[dict[str, Any]], count_run: Callable[[], Any] = lambda: None
    ) -> list[Result]:
        """Measure all methods on one batch, in one mode (`"greedy"` or `"sample"`), and return a result per method.

        `count_run` is called after each timed run.
        """
        inputs = inputs_of(self.pair, batch)
        seed = self.options.seed + index
        texts: dict[str, list[torch.Tensor]] = {method: [] for method in self.methods}  # of each repeat, [B, N]
        seconds: dict[str, list[float]] = {method: [] for method in self.methods}
        # The first call with prompts of a new length takes longer.
        self.pair.target.generate(**inputs, **self._call(BASELINE, mode) | {"max_new_tokens": 1})
        for _ in range(self.options.repeats):
            for method in self.methods:
                self._initial.restore()
                torch.manual_seed(seed)
                # On a CPU, timing the phases only reads a clock. On a GPU, it needs events, so it has a separate run.
                timer = nullcontext() if inputs["input_ids"].is_cuda else timed_phases()
                with timer:
                    call = self._call(method, mode)
                    tokens, taken = generate_timed(self.pair.target, inputs, method == PACKED, **call)
                texts[method].append(tokens)
                seconds[method].append(taken)
                count_run()
        temperature = self.options.temperature if mode == "sample" else 0.0
        about = {
            "mode": mode,
            "temperature": temperature,
            "prompt": index,
            "sources": [source(prompt) for prompt in batch],
        }
        load = load_per_core()
        results = []
        expected = texts[BASELINE][0]
        for method, found in texts.items():
            call = self._call(method, mode)
            torch.manual_seed(seed)
            figures: Figures = {"load": load} | self._speed(found[-1], seconds[method]) | self._rounds(inputs, call)
            others = [tokens for tokens in found if not torch.equal(tokens, expected)]
            figures["equals_plain"] = not others
            if others and drafter_in(call) is not None:
                plain = self._call(BASELINE, mode)
                figures["divergences"] = find_divergences(self.pair.target, inputs, others[0], seed, **plain)
            results.append(Result(method, about, figures | self._columns(inputs, call)))
        return results

    def _call(self, method: str, mode: str) -> Arguments:
        choice: Arguments = {"do_sample": False}
        if mode == "sample":
            choice = {"do_sample": True, "temperature": self.options.temperature, "top_k": 0, "top_p": 1.0}
        return self.methods[method] | choice | {"max_new_tokens": self.options.max_new_tokens}

    def _speed(self, tokens: torch.Tensor, seconds: list[float]) -> Figures:
        ends = eos_ids_of(self.pair.target.generation_config)
        texts = [cut_at_end(text, ends).ids for text in tokens.tolist()]
        count = sum(map(len, texts))
        median = statistics.median(seconds)
        return {
            "new_tokens": count,
            "seconds": median,
            "seconds_each": seconds,
            "tokens_per_second": count / median,
            "distinct_4gram": statistics.fmean(map(distinct_ngram_ratio, texts)),
        }

    def _columns(self, inputs: Any, call: Arguments) -> Figures:
        """Measure the additional columns of the options, each in separate runs."""
        target = self.pair.target
        found: Figures = {}
        if FIRST_TOKEN in self.options.columns:
            first = call | {"max_new_tokens": 1}
            runs = (generate_timed(target, inputs, **first) for _ in range(self.options.repeats))
            found[FIRST_TOKEN] = statistics.median(seconds for _, seconds in runs)
        if PEAK_MEMORY in self.options.columns:
            torch.cuda.reset_peak_memory_stats(target.device)
            target.generate(**inputs, **call)
            found[PEAK_MEMORY] = torch.cuda.max_memory_allocated(target.device)
        return found

    def _rounds(self, inputs: Any, call: Arguments) -> Figures:
        """Return the acceptance and the time of a round, from another run if the last timed run did not record them."""
        milliseconds = None
        drafter = drafter_in(call)
        if drafter is not None:
            if drafter.stats.phases is None:
                self._initial.restore()
                with timed_phases():
                    self.pair.target.generate(**inputs, **call)
            stats = drafter.stats
            loops = max(map(len, stats.rows))
            if stats.phases and loops:
                milliseconds = {name: 1000 * seconds / loops for name, seconds in stats.phases.items()}
        elif call.keys() & {"prompt_lookup_num_tokens", "assistant_model", "use_mtp"}:
            lengths = streamed_rounds(self.pair.target, inputs, **call)
            stats = DecodingStats(max(lengths, default=1) - 1, rows=[lengths])
        else:
            stats = DecodingStats(0)
        result: Figures = {
            "num_rounds": stats.num_rounds,
            "num_drafted": stats.num_drafted,
            "num_lookups": stats.num_lookups,
            "proposal_length": None,
            "lookup_length": None,
            "acceptance_length": None,
            "tokens_per_forward": None,
            "acceptance_rate_at": stats.acceptance_rate_at or None,
            "ms_per_round": milliseconds,
        }
        if stats.num_drafted:
            result["acceptance_length"] = stats.acceptance_length
            if stats.proposed:
                result["proposal_length"] = stats.proposal_length
        if stats.num_lookups:
            result["lookup_length"] = stats.lookup_length
        if stats.num_rounds:
            result["tokens_per_forward"] = stats.tokens_per_forward
        return result

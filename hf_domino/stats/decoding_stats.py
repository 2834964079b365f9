"""Statistics of assisted generation: acceptance and speed."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_domino._common.verdict import speed

_last = threading.local()
_last_of_any_thread: weakref.WeakKeyDictionary[nn.Module, DecodingStats] = weakref.WeakKeyDictionary()


@dataclass
class Pause:
    """A pause of drafting: rounds emitted fewer tokens than plain decode steps in the same time."""

    tokens: float  # tokens that a round was expected to emit, per sequence
    cost: float  # time of a round, in plain decode steps
    num_readings: int  # how often a round was compared with a plain decode step; 0 for a nominal cost
    first_round: int = 0  # rounds of the call before the pause
    num_steps: int = 0  # plain decode steps that the pause lasted

    @property
    def reason(self) -> str:
        """Why drafting paused, in words."""
        return f"a round took as long as {self.cost:.2f} plain decode steps and emitted {self.tokens:.2f} tokens"

    def __str__(self) -> str:
        if self.num_readings:
            source = f"measured {self.num_readings} x"
        else:
            source = "nominal"
        return (
            f"after round {self.first_round}, for {self.num_steps} tokens: a round was expected to emit "
            f"{self.tokens:.2f} tokens and to take as long as {self.cost:.2f} plain decode steps ({source})"
        )


@dataclass
class DecodingStats:
    """Statistics of one assisted `generate` call.

    Args:
        num_draft_tokens (`int`): The most proposals that a round can draft along one path (P).
        rows (`list[list[int]]`): For each sequence of the batch, the acceptance length of each round: its accepted
            proposals and the bonus token, as far as they are returned. Prefill is not a round: it emits the first
            token, and rounds emit the others. Until the call is over, the last round of a sequence can include tokens
            past its end.
        proposed (`list[list[int]]`): For each sequence, how many tokens each round proposed, in all branches of a tree;
            0 for a plain decode step.
        num_new_tokens (`int`): Tokens returned, over all sequences.
        seconds (`float`): Wall time of the decoding loop, prefill included.
        pauses (`list[Pause]`): When and why drafting paused.
        num_paused (`int`): Plain decode steps taken because drafting paused, over all sequences.
        phases (`dict[str, float]`, *optional*): With [`timed_phases`], the seconds that all rounds (without prefill)
            spent in each phase: `draft` (the drafter's forward), `correction`, `target_forward`, `verify` (choosing and
            committing) and `rest`. They add up to the total time of the rounds.
        target (`str`, *optional*): How the target differs from the one that the drafter was trained for, such as in
            dtype, name or an adapter; None if it does not, or if the drafter's configuration does not say.
        looked_up (`list[list[bool]]`): For each sequence, whether each round proposed tokens from prompt lookup.
        chain (`str`, *optional*): Why rounds that wanted trees could not propose them; None if nothing prevented it.
        why_growing (`str`, *optional*): Why rounds did not run with fixed shapes, where the call or the
            device prefers these; None otherwise.
        tree_size (`int`, *optional*): The most nodes of a round's tree; None if all rounds proposed chains.
    """

    num_draft_tokens: int
    rows: list[list[int]] = field(default_factory=list)
    proposed: list[list[int]] = field(default_factory=list)
    num_new_tokens: int = 0
    seconds: float = 0.0
    phases: dict[str, float] | None = None
    pauses: list[Pause] = field(default_factory=list)
    num_paused: int = 0
    target: str | None = None
    looked_up: list[list[bool]] = field(default_factory=list)
    chain: str | None = None
    tree_size: int | None = None
    why_growing: str | None = None

    @classmethod
    def of_rows(cls, num_draft_tokens: int, num_rows: int, target: str | None = None) -> DecodingStats:
        """Create the statistics of a call that is about to start, with this many sequences."""
        stats = cls(num_draft_tokens, target=target)
        for lists in (stats.rows, stats.proposed, stats.looked_up):
            lists.extend([] for _ in range(num_rows))
        return stats

    @property
    def acceptance_lengths(self) -> list[int] | list[list[int]]:
        """Acceptance length of each round; for a batch, one list per sequence."""
        return self.rows[0] if len(self.rows) == 1 else self.rows

    @property
    def num_rounds(self) -> int:
        """Number of rounds, plain decode steps included, over all sequences."""
        return sum(len(row) for row in self.rows)

    @property
    def num_drafted(self) -> int:
        """Number of rounds with drafted proposals, over all sequences; all rounds if `proposed` is empty."""
        return len(self._drafted_lengths)

    @property
    def num_lookups(self) -> int:
        """Number of rounds whose proposals came from prompt lookup, over all sequences."""
        return len(self._lookup_lengths)

    @property
    def lookup_length(self) -> float:
        """Mean acceptance length of the rounds with prompt lookup, bonus token included; NaN if there were none."""
        return _mean(self._lookup_lengths)

    @property
    def acceptance_length(self) -> float:
        """Mean acceptance length of the rounds that drafted, bonus token included; NaN if none did."""
        return _mean(self._drafted_lengths)

    @property
    def tokens_per_forward(self) -> float:
        """Mean number of tokens that a round emitted, plain decode steps included; NaN if there were no rounds."""
        return _mean([length for row in self.rows for length in row])

    @property
    def acceptance_rate_at(self) -> list[float]:
        """Share of drafted rounds that accepted proposal k, for k in `[0, num_draft_tokens)`; empty if none drafted.

        A round that made fewer proposals, or in which the text ended before, counts as not accepting proposal k. The
        sum of all shares is the acceptance length minus one.
        """
        lengths = self._drafted_lengths
        if lengths:
            return [sum(n > k + 1 for n in lengths) / len(lengths) for k in range(self.num_draft_tokens)]
        return []

    @property
    def proposal_length(self) -> float:
        """Mean number of proposals of the rounds that drafted, counting all nodes of a tree; NaN if none did."""
        return _mean(
            [count for _, count, is_lookup in self._rounds if count and not is_lookup] if self.proposed else []
        )

    @property
    def num_plain_steps(self) -> int:
        """Number of rounds without proposals, over all sequences.

        Drafting had paused, the time of a plain decode step was measured, or there was nothing left to draft.
        """
        return sum(count == 0 for row in self.proposed for count in row)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time, prefill included."""
        if self.seconds:
            return self.num_new_tokens / self.seconds
        return float("nan")

    @property
    def summary(self) -> str:
        """The most important figures of the call in one line."""
        took = f"{self.seconds:.1f} s, {speed(self.tokens_per_second)}"
        if self.num_rounds:
            a_round = f", {self.tokens_per_forward:.2f} tokens a forward"
        else:
            a_round = ""
        return f"{self.num_new_tokens} tokens in {took}{a_round}"

    @property
    def _rounds(self) -> list[tuple[int, int, bool]]:
        """For every round, its acceptance length, how many tokens it proposed, and whether prompt lookup found them."""
        proposed = self.proposed if any(self.proposed) else self.rows
        if any(self.looked_up):
            looked_up = self.looked_up
        else:
            looked_up = [[False] * len(row) for row in self.rows]
        # Another thread can read this while a round is being committed, so the lists can differ in length.
        return [one for row in zip(self.rows, proposed, looked_up, strict=True) for one in zip(*row, strict=False)]

    @property
    def _drafted_lengths(self) -> list[int]:
        return [length for length, count, is_lookup in self._rounds if count and not is_lookup]

    @property
    def _lookup_lengths(self) -> list[int]:
        return [length for length, _, is_lookup in self._rounds if is_lookup]

    def count_pause(self, pause: Pause, rows: Sequence[int]) -> None:
        """Record that a round of these sequences was part of a pause."""
        if not pause.num_steps:
            pause.first_round = len(self.proposed[rows[0]])
            self.pauses.append(pause)
        pause.num_steps += 1
        self.num_paused += len(rows)

    def cut(self, num_new_tokens: Sequence[int]) -> None:
        """Limit the acceptance lengths to tokens that are returned; a round past the end of its text emitted none.

        Args:
            num_new_tokens (`Sequence[int]`): Tokens returned for each sequence, including the one from the prefill.
        """
        self.num_new_tokens = sum(num_new_tokens)
        for lengths, count in zip(self.rows, num_new_tokens, strict=True):
            left = count - 1
            for index, length in enumerate(lengths):
                lengths[index] = min(length, left)
                left -= lengths[index]

    def __str__(self) -> str:
        rates = " ".join(f"{rate:.2f}" for rate in self.acceptance_rate_at)
        lines = [
            ("new tokens", f"{self.num_new_tokens}"),
            ("rounds", f"{self.num_rounds}"),
            ("  that drafted", f"{self.num_drafted}"),
            *([("  with prompt lookup", f"{self.num_lookups}")] if self.num_lookups else []),
            ("  plain decode steps", f"{self.num_plain_steps}"),
            ("    drafting paused", f"{self.num_paused}"),
            ("nodes verified a round" if self.tree_size else "proposals a draft", _number(self.proposal_length)),
            ("acceptance length", _number(self.acceptance_length)),
            ("acceptance rate at", rates or "-"),
            *([("tokens of a lookup", _number(self.lookup_length))] if self.num_lookups else []),
            ("tokens per forward", _number(self.tokens_per_forward)),
            ("tokens/s", _number(self.tokens_per_second, 1)),
        ]
        lines += [("target", self.target)] if self.target else []
        lines += [("chains, no trees", self.chain)] if self.chain else []
        lines += [("growing caches", self.why_growing)] if self.why_growing else []
        lines += [("paused", str(pause)) for pause in self.pauses]
        lines += [(f"{name}, s", f"{seconds:.3f}") for name, seconds in (self.phases or {}).items()]
        return "\n".join(f"{name:<24}{value}" for name, value in lines)


def _mean(values: Sequence[int]) -> float:
    if values:
        return sum(values) / len(values)
    return float("nan")


def _number(value: float, digits: int = 2) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def record_stats(drafter: nn.Module, stats: DecodingStats) -> None:
    """Make `drafter.stats` return `stats` in the calling thread, and in threads that have not generated yet."""
    if not hasattr(_last, "by_drafter"):
        _last.by_drafter = weakref.WeakKeyDictionary()
    _last.by_drafter[drafter] = _last_of_any_thread[drafter] = stats


def last_stats(drafter: nn.Module) -> DecodingStats:
    """Return statistics of the calling thread's last assisted generation with `drafter`, or else of any thread's."""
    own: DecodingStats | None = getattr(_last, "by_drafter", {}).get(drafter)
    stats = own or _last_of_any_thread.get(drafter)
    if stats is None:
        raise RuntimeError("drafter.stats is empty: call model.generate(..., assistant_model=drafter) first.")
    return stats


def hand_out(carrier: Any, stats: DecodingStats) -> None:
    """Set `stats` on a streamer or an output, unless it accepts no attribute or uses `stats` for something else."""
    if isinstance(getattr(carrier, "stats", None), DecodingStats | None):
        with suppress(AttributeError):
            carrier.stats = stats

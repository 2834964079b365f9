"""Statistics of assisted generation: acceptance and speed."""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import nn

# Old names of fields, which still work.
RENAMED = {
    "copied": "looked_up",
    "num_copied": "num_lookups",
    "copied_length": "lookup_length",
    "num_single_steps": "num_plain_steps",
}

_last = threading.local()
_last_of_any_thread: weakref.WeakKeyDictionary[nn.Module, DecodingStats] = weakref.WeakKeyDictionary()


@dataclass
class Pause:
    """Why drafting paused: rounds emitted fewer tokens than plain decode steps in the same time."""

    tokens: float  # expected of a round, per sequence
    cost: float  # time of a round, in plain decode steps
    num_readings: int  # comparisons of a round with a plain decode step; 0 for a nominal cost
    first_round: int = 0  # rounds of the call before it
    num_steps: int = 0  # plain decode steps it lasted

    @property
    def reason(self) -> str:
        """Why, in plain words."""
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
    """What one assisted `generate` did.

    Args:
        num_draft_tokens (`int`): Most drafted proposals per round (P).
        rows (`list[list[int]]`): Per row of the batch, the acceptance length of each round: accepted proposals and the
            bonus token, as far as they are returned. Prefill is not a round: it emits the first token, and rounds the
            others. Until the call is over, a row's last round may count tokens behind its end.
        proposed (`list[list[int]]`): Per row, how many tokens each round proposed, those of all branches of a tree; 0
            for a plain decode step.
        num_new_tokens (`int`): Tokens returned, over all rows.
        seconds (`float`): Wall time of the decoding loop, prefill included.
        pauses (`list[Pause]`): When drafting paused, and why.
        num_paused (`int`): Plain decode steps, over all rows, because drafting paused.
        phases (`dict[str, float]`, *optional*): Seconds of all rounds, prefill not counted, inside [`timed_phases`]:
            `draft` (the drafter's forward), `correction`, `target_forward`, `verify` (choosing and committing) and
            `rest`. Their sum is the whole.
        target (`str`, *optional*): In what the target differs from the one the drafter was trained for, such as dtype,
            name or an adapter; None if in nothing, or if the drafter's configuration does not say.
        looked_up (`list[list[bool]]`): Per row, whether each round proposed tokens that prompt lookup found.
        chain (`str`, *optional*): Why rounds could not propose trees, where they were to; None where nothing stood
            against these.
        why_growing (`str`, *optional*): On a GPU, why rounds did not run in fixed shape; None where they did.
        tree_size (`int`, *optional*): Most nodes of a round's tree; None where all rounds proposed chains.
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

    def __getattr__(self, name: str) -> Any:
        if name not in RENAMED:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        warnings.warn(
            f"stats.{name} is stats.{RENAMED[name]}; the old name goes in the next version.", FutureWarning, 2
        )
        return getattr(self, RENAMED[name])

    @classmethod
    def of_rows(cls, num_draft_tokens: int, num_rows: int, target: str | None = None) -> DecodingStats:
        """Statistics of a call that is about to begin."""
        stats = cls(num_draft_tokens, target=target)
        for lists in (stats.rows, stats.proposed, stats.looked_up):
            lists.extend([] for _ in range(num_rows))
        return stats

    @property
    def acceptance_lengths(self) -> list[int] | list[list[int]]:
        """Acceptance length of each round; one list per row for a batch."""
        return self.rows[0] if len(self.rows) == 1 else self.rows

    @property
    def num_rounds(self) -> int:
        """Verifications, over all rows."""
        return sum(len(row) for row in self.rows)

    @property
    def num_drafted(self) -> int:
        """Rounds with drafted proposals, over all rows; all rounds where it is not known how many they proposed."""
        return len(self._drafted_lengths)

    @property
    def num_lookups(self) -> int:
        """Rounds whose proposals came from prompt lookup, over all rows."""
        return len(self._lookup_lengths)

    @property
    def lookup_length(self) -> float:
        """Mean tokens of the rounds with prompt lookup, bonus included; NaN if there was none."""
        return _mean(self._lookup_lengths)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of the rounds that drafted, bonus included; NaN if none did."""
        return _mean(self._drafted_lengths)

    @property
    def tokens_per_forward(self) -> float:
        """Mean tokens of all rounds, plain decode steps included; NaN without a round."""
        return _mean([length for row in self.rows for length in row])

    @property
    def acceptance_rate_at(self) -> list[float]:
        """Share of drafted rounds that accepted proposal k, for k in `[0, num_draft_tokens)`; empty if none did.

        A round that made fewer proposals, or ended the text before, did not accept it; the sum is the acceptance length
        less one.
        """
        lengths = self._drafted_lengths
        if lengths:
            return [sum(n > k + 1 for n in lengths) / len(lengths) for k in range(self.num_draft_tokens)]
        return []

    @property
    def proposal_length(self) -> float:
        """Mean proposals of the rounds that drafted, all nodes of their trees; NaN if none did."""
        return _mean(
            [count for _, count, is_lookup in self._rounds if count and not is_lookup] if self.proposed else []
        )

    @property
    def num_plain_steps(self) -> int:
        """Rounds without proposals, over all rows: of pauses, to compare times, or where nothing was left to draft."""
        return sum(count == 0 for row in self.proposed for count in row)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time, prefill included."""
        if self.seconds:
            return self.num_new_tokens / self.seconds
        return float("nan")

    @property
    def summary(self) -> str:
        """The figures of the call in one line."""
        speed = f"{self.seconds:.1f} s, {self.tokens_per_second:.0f} tokens/s"
        if self.num_rounds:
            a_round = f", {self.tokens_per_forward:.2f} tokens a forward"
        else:
            a_round = ""
        return f"{self.num_new_tokens} tokens in {speed}{a_round}"

    @property
    def _rounds(self) -> list[tuple[int, int, bool]]:
        """Acceptance length of every round, how many tokens it proposed, and whether prompt lookup found them."""
        proposed = self.proposed if any(self.proposed) else self.rows
        if any(self.looked_up):
            looked_up = self.looked_up
        else:
            looked_up = [[False] * len(row) for row in self.rows]
        # Asked from another thread, a round may just have been committed.
        return [one for row in zip(self.rows, proposed, looked_up, strict=True) for one in zip(*row, strict=False)]

    @property
    def _drafted_lengths(self) -> list[int]:
        return [length for length, count, is_lookup in self._rounds if count and not is_lookup]

    @property
    def _lookup_lengths(self) -> list[int]:
        return [length for length, _, is_lookup in self._rounds if is_lookup]

    def count_pause(self, pause: Pause | None, rows: Sequence[int]) -> None:
        """Note that a round of these sequences was part of a pause of drafting, if it was."""
        if pause is None:
            return
        if not pause.num_steps:
            pause.first_round = len(self.proposed[rows[0]])
            self.pauses.append(pause)
        pause.num_steps += 1
        self.num_paused += len(rows)

    def cut(self, num_new_tokens: Sequence[int]) -> None:
        """Count as tokens of a round those that are returned; a round behind the end of all texts emitted none.

        Args:
            num_new_tokens (`Sequence[int]`): Tokens returned of each row, that of the prefill among them.
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
    """Make `stats` what `drafter.stats` returns in the calling thread, and in threads that have not generated."""
    if not hasattr(_last, "by_drafter"):
        _last.by_drafter = weakref.WeakKeyDictionary()
    _last.by_drafter[drafter] = _last_of_any_thread[drafter] = stats


def last_stats(drafter: nn.Module) -> DecodingStats:
    """Statistics of the calling thread's last assisted generation with `drafter`, or else of any thread's."""
    own: DecodingStats | None = getattr(_last, "by_drafter", {}).get(drafter)
    stats = own or _last_of_any_thread.get(drafter)
    if stats is None:
        raise RuntimeError("drafter.stats is empty: call model.generate(..., assistant_model=drafter) first.")
    return stats


def hand_out(carrier: Any, stats: DecodingStats) -> None:
    """Let a streamer or an output carry the statistics of its call, unless it takes none or has its own."""
    if isinstance(getattr(carrier, "stats", None), DecodingStats | None):
        with suppress(AttributeError):
            carrier.stats = stats

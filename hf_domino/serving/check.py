"""Compare a server with Transformers: its texts, its rounds, and which proposals it accepts.

A drafter that is read wrongly writes the same text in more rounds, so rounds decide as much as texts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_domino.serving.client import Answers

MOST_MORE_ROUNDS = 0.02  # of ours: a request's last round may be drafted or not
SAME_LAW = "float32"  # where texts must be equal; narrower floats part them at ties


@dataclass(frozen=True)
class Leg:
    """One way to generate the texts.

    Args:
        name (`str`): Who did it.
        at_once (`int`): Requests that were open at the same time.
        answers ([`Answers`]): What came of them.
    """

    name: str
    at_once: int
    answers: Answers


@dataclass(frozen=True)
class ServeCheck:
    """A server with a drafter beside the same server without, Transformers and our loop.

    Args:
        dtype (`str`): Of the target and the drafter everywhere.
        plain ([`Leg`]): Transformers alone.
        ours ([`Leg`]): Our loop.
        control (`tuple[Leg, ...]`): The server without a drafter.
        served (`tuple[Leg, ...]`): The server with it.
    """

    dtype: str
    plain: Leg
    ours: Leg
    control: tuple[Leg, ...]
    served: tuple[Leg, ...]

    @property
    def legs(self) -> tuple[Leg, ...]:
        """All of them."""
        return (self.plain, self.ours, *self.control, *self.served)

    def num_equal(self, leg: Leg, other: Leg | None = None) -> int:
        """Texts of a leg that are another's, Transformers' by default."""
        texts = (other or self.plain).answers.texts
        return sum(found == text for found, text in zip(leg.answers.texts, texts, strict=True))

    @property
    def faults(self) -> tuple[str, ...]:
        """What is not as it should be, a sentence each; empty where the server drafts as we do."""
        return (*self._text_faults(), *self._round_faults())

    def _text_faults(self) -> list[str]:
        expected = self.plain if self.dtype == SAME_LAW else self.control[0]
        whole, found = len(expected.answers.texts), []
        for leg in self.served:
            if (count := self.num_equal(leg, expected)) < whole and self.dtype == SAME_LAW:
                found.append(f"With {leg.at_once} at once {count} of {whole} texts are those of {expected.name}.")
        return found

    def _round_faults(self) -> list[str]:
        ours, found = self.ours.answers.rounds, []
        for leg in self.served:
            if not leg.answers.rounds:
                found.append(f"With {leg.at_once} at once nothing was drafted.")
            elif leg.answers.rounds > (1 + MOST_MORE_ROUNDS) * ours and self.dtype == SAME_LAW:
                found.append(
                    f"With {leg.at_once} at once the server needed {leg.answers.rounds} rounds, we {ours}: it drafts "
                    "otherwise than we do, or another target's drafter."
                )
        return found

    @property
    def slower(self) -> tuple[str, ...]:
        """Where the drafter slows the server, a sentence each: no fault, but no reason to serve with it either."""
        pairs = zip(self.control, self.served, strict=True)
        speeds = [(leg.at_once, *(one.answers.tokens_per_second for one in (leg, alone))) for alone, leg in pairs]
        return tuple(
            f"With {count} at once the drafter slows the server: {found:.0f} tokens/s, {alone:.0f} without."
            for count, found, alone in speeds
            if found < alone
        )

    def rows(self) -> list[dict[str, Any]]:
        """A row for each leg, as JSON holds it."""
        return [
            {
                "name": leg.name,
                "at_once": leg.at_once,
                "texts": len(leg.answers.texts),
                "equal_to_transformers": self.num_equal(leg),
                "equal_to_server": self.num_equal(leg, self.control[0]),
                "tokens": sum(map(len, leg.answers.texts)),
                "seconds": leg.answers.seconds,
                "tokens_per_second": leg.answers.tokens_per_second,
                "rounds": leg.answers.rounds,
                "acceptance_length": leg.answers.acceptance_length,
                "accepted": list(leg.answers.accepted),
            }
            for leg in self.legs
        ]

    def __str__(self) -> str:
        head = ("", "at once", "texts as Transformers", "as the server alone", "rounds", "acceptance", "tokens/s")
        lines = [head, *(self._line(leg) for leg in self.legs)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [f"{line[0]:<{widths[0]}}  {_right(line[1:], widths[1:])}".rstrip() for line in lines]
        accepted = [f"{leg.name}, {leg.at_once} at once: {_rates(leg)}" for leg in (self.ours, *self.served)]
        fine = (
            "The server drafts as we do." if self.dtype == SAME_LAW else f"Texts and rounds are judged in {SAME_LAW}."
        )
        verdict = self.faults or (fine,)
        return "\n".join([*table, "", "accepted by position:", *accepted, "", *verdict, *self.slower])

    def _line(self, leg: Leg) -> tuple[str, ...]:
        answers, whole = leg.answers, len(leg.answers.texts)
        length = answers.acceptance_length
        equal = (f"{self.num_equal(leg, other)}/{whole}" for other in (self.plain, self.control[0]))
        rounds = (str(answers.rounds), f"{length:.3f}") if length else ("", "")
        return (leg.name, str(leg.at_once), *equal, *rounds, f"{answers.tokens_per_second:.0f}")


def _right(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))


def _rates(leg: Leg) -> str:
    return " ".join(f"{count / max(1, leg.answers.rounds):.2f}" for count in leg.answers.accepted)

"""The chance that a candidate is the target's own token: what the drafter says of it, made true by what was verified.

Shapes: B rows, L lanes, M candidates, C verified tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_domino.decoding.matches import GUESSES, kind_of
from hf_domino.decoding.pacing.estimates import Acceptance

FIRST_SHARPNESS = 1.2
LEAST, MOST = 0.25, 4.0
PRIOR_CURVATURE = 20.0  # weight of the first guess, as curvature of the log-likelihood
MEMORY = 0.99  # a round
LEARNT_ROUNDS, LEARN_EVERY = 64, 4  # learning takes 2 % of a small target's round
FAR = 60.0  # what is so far below the best score never wins
Copied = list[list[tuple[int, int]]]  # of each row's lanes: the copied token and the length of its match, or (0, 0)


class Sharpness:
    """Alpha, the scale of the draft law's scores that makes verified tokens likeliest; learnt by Newton steps."""

    def __init__(self, value: float = FIRST_SHARPNESS):
        self.value, self._curvature = value, PRIOR_CURVATURE

    def observe(self, scores: torch.Tensor, luck: torch.Tensor | None, winners: torch.Tensor) -> None:
        """Learn from races whose winner is known.

        Args:
            scores (`torch.Tensor`): `[C, M]`.
            luck (`torch.Tensor`, *optional*): What noise adds, `[C, M]`.
            winners (`torch.Tensor`): Place of the target's own token among the candidates, `[C]`.
        """
        scores = scores.clamp_min(scores.amax(dim=1, keepdim=True) - FAR)
        chances = (self.value * scores if luck is None else self.value * scores + luck).softmax(dim=1)
        means = (chances * scores).sum(dim=1)
        slope = (scores.gather(1, winners[:, None])[:, 0] - means).sum()
        curvature = (chances * (scores - means[:, None]).square()).sum()
        slope, curvature = torch.stack((slope, curvature)).tolist()
        if not (math.isfinite(slope) and math.isfinite(curvature)):
            return
        self._curvature = MEMORY * self._curvature + curvature
        self.value = min(max(self.value + slope / self._curvature, LEAST), MOST)


class CopyWeights:
    """How much of the chance copies take, by the length of the match before them.

    The weight of a source in a mixture of two, learnt by the share that it had in what won.

    Args:
        guesses (`Iterable[float]`): First guesses, by class of length.
    """

    def __init__(self, guesses: Iterable[float]):
        self._acceptance = Acceptance(guesses)

    def weight(self, length: int) -> float:
        """Of a copy behind a match of this length; 0 without a match."""
        return self._acceptance.chance(kind_of(length)) if length else 0.0

    def of(self, copied: Copied) -> torch.Tensor:
        """Weights `[B, L, 1]`."""
        weights = [[self.weight(length) for _, length in row] for row in copied]
        return torch.tensor(weights, dtype=torch.float32)[..., None]

    def observe(self, length: int, has_won: bool, drafted: float = 0.0) -> None:
        """Learn from a copy behind a match of this length, to whose token the drafter gave a chance, too."""
        weight = self.weight(length)
        share = weight / (weight + (1 - weight) * drafted) if has_won and weight else 0.0
        self._acceptance.add(kind_of(length), share)


@dataclass(frozen=True)
class Race:
    """Scores that rank the children of one depth's lanes.

    Args:
        scores (`torch.Tensor`, *optional*): The draft law's, `[B, L, M]`; None where only copies go so deep.
        luck (`torch.Tensor`, *optional*): What noise adds, `[B, M]` for all lanes or `[B, L, M]`; None for greedy.
        token_ids (`torch.Tensor`, *optional*): The candidates, likewise.
        copied (`list[list[tuple[int, int]]]`, *optional*): How the text goes on behind each lane; None where it does
            so behind none.
    """

    scores: torch.Tensor | None = None
    luck: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    copied: Copied | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Scores, candidates and, where there is any, luck."""
        return tuple(each for each in (self.scores, self.token_ids, self.luck) if each is not None)

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor]) -> Race:
        """Put the tensors together again."""
        return cls(tensors[0], tensors[2] if len(tensors) == 3 else None, tensors[1])

    def decided(self, row: int, lane: int, token: int) -> Decided:
        """The outcome behind one lane, where this token is the target's."""
        copied = None if self.copied is None else self.copied[row][lane]
        if self.scores is None or self.token_ids is None:
            return Decided(token, copied)
        place = row if self.token_ids.dim() == 2 else (row, lane)
        luck = None if self.luck is None else self.luck[place]
        return Decided(token, copied, self.scores[row, lane], luck, self.token_ids[place])


@dataclass(frozen=True)
class Decided:
    """A race behind one lane whose winner is known.

    Args:
        token (`int`): The target's own.
        copied (`tuple[int, int]`, *optional*): The token that was copied, and the length of the match before it.
        scores (`torch.Tensor`, *optional*): The candidates', `[M]`.
        luck (`torch.Tensor`, *optional*): `[M]`.
        token_ids (`torch.Tensor`, *optional*): `[M]`.
    """

    token: int
    copied: tuple[int, int] | None = None
    scores: torch.Tensor | None = None
    luck: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None

    @property
    def is_copied(self) -> bool:
        """Whether the text proposed the winner, and the drafter ranked another token first."""
        if self.copied is None or not self.copied[1] or self.copied[0] != self.token:
            return False
        if self.scores is None or self.token_ids is None:
            return True
        raced = self.scores if self.luck is None else self.scores + self.luck
        return int(self.token_ids[raced.argmax()]) != self.token


class Chances:
    """Learned chances of a drafter's and of a text's tokens, for one target and law.

    Args:
        sharpness (`float` or `torch.Tensor`, *optional*): Alpha to begin with; a tensor `[]` where trees are grown as
            part of a graph.
    """

    def __init__(self, sharpness: Any = FIRST_SHARPNESS) -> None:
        self.sharpness = Sharpness(sharpness)
        self.beside, self.deeper = CopyWeights(GUESSES.values()), CopyWeights(GUESSES.values())
        self._num_rounds = 0

    def wants_to_learn(self) -> bool:
        """Whether to learn from a round: from all at first, later from some."""
        self._num_rounds += 1
        return self._num_rounds <= LEARNT_ROUNDS or self._num_rounds % LEARN_EVERY == 0

    def of(self, race: Race) -> tuple[torch.Tensor, torch.Tensor]:
        """Chances `[B, L, M]` of the children of each lane, and their tokens `[B, 1 or L, M]`.

        With copies there is a child more: each lane's copy, where that is no candidate.
        """
        if race.scores is None or race.token_ids is None:
            assert race.copied is not None
            return self.deeper.of(race.copied), _tokens(race.copied)
        ids, luck = race.token_ids, race.luck
        if ids.dim() == 2:  # the same for all lanes
            ids, luck = ids[:, None], None if luck is None else luck[:, None]
        chances = self.drafted(race.scores, luck)
        if race.copied is None:
            return chances, ids
        weights, tokens = self.beside.of(race.copied), _tokens(race.copied)
        is_copy = ids == tokens
        chances = torch.addcmul(chances * (1 - weights), is_copy.to(chances), weights)
        alone = weights.masked_fill(is_copy.any(dim=2, keepdim=True), 0.0)
        return torch.cat((chances, alone), dim=2), torch.cat((ids.expand(chances.shape), tokens), dim=2)

    def drafted(self, scores: torch.Tensor, luck: torch.Tensor | None) -> torch.Tensor:
        """Of candidates with these scores `[..., M]` and luck, without copies; where all are forbidden, none."""
        raced = self.sharpness.value * scores
        return (raced if luck is None else raced + luck).softmax(dim=-1).nan_to_num(0.0)

    def observe(self, decided: Sequence[Decided]) -> None:
        """Learn from races whose winner is known."""
        if not decided:
            return
        drafted = [one for one in decided if one.scores is not None]
        copied_alone = [one for one in decided if one.scores is None]
        won = self._observe_drafted(drafted) if drafted else []
        for one, chance in zip((*drafted, *copied_alone), (*won, *(0.0 for _ in copied_alone)), strict=True):
            if one.copied is not None and one.copied[1]:
                weights = self.deeper if one.scores is None else self.beside
                weights.observe(one.copied[1], one.copied[0] == one.token, chance)

    def _observe_drafted(self, decided: Sequence[Decided]) -> list[float]:
        """Learn from those that have candidates; returns the chance that each winner was given among them."""
        scores = torch.stack([one.scores for one in decided if one.scores is not None])  # [C, M]
        luck = (
            torch.stack([one.luck for one in decided if one.luck is not None]) if decided[0].luck is not None else None
        )
        ids = torch.stack([one.token_ids for one in decided if one.token_ids is not None])
        is_winner = ids == torch.tensor([[one.token] for one in decided], device=ids.device)
        known, winners = is_winner.max(dim=1)
        chances = (self.drafted(scores, luck) * is_winner).sum(dim=1).tolist()
        if known.all():
            self.sharpness.observe(scores, luck, winners)
        elif known.any():
            self.sharpness.observe(scores[known], None if luck is None else luck[known], winners[known])
        return chances


def _tokens(copied: Copied) -> torch.Tensor:
    """Copied tokens `[B, L, 1]`."""
    return torch.tensor([[token for token, _ in row] for row in copied])[..., None]

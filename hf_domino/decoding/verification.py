"""Verification: how many proposals are accepted, and the target's own next token.

A position's token is the likeliest one or, where the target samples, the one that its noise makes it draw. Drafts were
chosen under the same noise and are accepted while they are that token: the text is the one of plain `generate`, with
the same seed where it samples (arXiv 2408.07978). Greedy is the case without noise. The other rule, which accepts more
and writes other texts of the same law, is in `residual/`.

Shapes: B rows of the batch, R rows still generated, P proposals, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_domino.decoding.noise.steps import StepNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import Listener
from hf_domino.decoding.sampling import TokenLaw, choose, race
from hf_domino.decoding.tree.form import Tree


@dataclass(frozen=True)
class Judgement:
    """A round's outcome, and what it was decided from.

    Args:
        scores (`torch.Tensor`): The target's processed scores `[R, W, V]`, of the anchor's position and each node's.
        outcome (`torch.Tensor`): Per row how many tokens are committed, then the tokens, accepted proposals and the
            bonus token: `[R, 1 + C + 1]` int64, where what stands behind the bonus token is anything. A count of 0
            says that a token could not be drawn. Everything the host must know, to be read at once.
        path (`torch.Tensor`, *optional*): The position that each token was chosen at, `[R, C + 1]`; None where that is
            its place.
    """

    scores: torch.Tensor
    outcome: torch.Tensor
    path: torch.Tensor | None = None

    @property
    def tokens(self) -> torch.Tensor:
        """Accepted proposals and the bonus token, `[R, C + 1]`."""
        return self.outcome[:, 1:]


def judge(
    law: TokenLaw, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor, noise: torch.Tensor | None
) -> Judgement:
    """Verify a round from the target's logits, without a synchronisation.

    Args:
        law ([`TokenLaw`]): The target's.
        prefixes ([`Prefixes`]): Tokens so far of the R rows.
        proposals ([`Tree`]): N nodes for each.
        logits (`torch.Tensor`): `[R, W, V]`.
        noise (`torch.Tensor`, *optional*): Of the steps from the anchor's on, `[R, C + 1, V]`; None for the likeliest
            tokens.

    Returns:
        [`Judgement`]: Still on the device.
    """
    scores = law.scores_behind(lambda: proposals.seen_by(prefixes), prefixes, logits)
    # Along the right path these [R, W] are its nodes.
    values, chosen = (None, choose(scores)) if noise is None else proposals.race(scores, noise)
    accepted, path = proposals.accepted(chosen)
    if path is not None:
        chosen = chosen.gather(1, path)
        values = None if values is None else values.gather(1, path)
    counts = accepted + 1
    if values is not None:  # what was drafted behind a text's end need not have a law
        counts = counts * (values.isnan().cumsum(dim=1).gather(1, accepted) == 0)
    return Judgement(scores, torch.cat((counts, chosen), dim=1), path)


def check_drawn(is_drawn: bool) -> None:
    """Raise as `torch.multinomial` does where there is no law to draw from.

    Raises:
        RuntimeError: If a token could not be drawn.
    """
    if not is_drawn:
        raise RuntimeError(
            "No token can be drawn: the target's processed scores are NaN or infinite, or all tokens are forbidden. "
            "generate fails here without a drafter, too; look at the logits processors, or run the target in bfloat16 "
            "or float32 if it overflows."
        )


Judge = Callable[[TokenLaw, Prefixes, Tree, torch.Tensor, torch.Tensor | None], Judgement]


class CoupledRule:
    """The rule of one call: drafts and target share the noise of each step, or have none.

    Args:
        law ([`TokenLaw`]): The target's.
        do_sample (`bool`): Whether the target samples.
        judge (`Callable`, *optional*): What takes the place of [`judge`], where it is a stage.
        is_watching (`bool`, *optional*, defaults to `True`): Whether to say if something else draws meanwhile.
    """

    draft_scores: torch.Tensor | None = None  # drafts are not drawn from a law of their own
    listener: Listener | None = None  # nor is anything to be known of them

    def __init__(self, law: TokenLaw, do_sample: bool, judge: Judge = judge, is_watching: bool = True):
        self._law, self._do_sample, self._judge, self._is_watching = law, do_sample, judge, is_watching
        self._steps: StepNoise | None = None
        self._prompt_length = 0
        self._noise: torch.Tensor | None = None  # of the round, [R, P + 1, V]

    def begin(self, prefixes: Prefixes, vocab_size: int) -> None:
        """The first token of all rows is about to be chosen."""
        if self._do_sample:
            self._prompt_length, longest = prefixes.lengths[0], self._law.stops.max_length
            num_steps = None if longest is None else max(longest - self._prompt_length, 1)
            device = prefixes.ids.device
            self._steps = StepNoise(len(prefixes.rows), vocab_size, device, num_steps, is_watching=self._is_watching)
        self.begin_round(prefixes, 0)

    def begin_round(self, prefixes: Prefixes, most: int) -> None:
        """A round of at most so many proposals begins."""
        if self._steps is not None:
            steps = [length - self._prompt_length for length in prefixes.lengths]
            self._noise = self._steps.ahead(prefixes.rows, steps, most + 1)

    @property
    def draft_noise(self) -> torch.Tensor | None:
        """The noise to choose proposals with, `[R, P, V]` or more positions; None for the likeliest tokens."""
        return self._noise

    def judge(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> Judgement:
        """Verify the round's proposals from the target's logits `[R, W, V]`."""
        noise = None if self._noise is None else self._noise[:, : proposals.depth + 1]
        return self._judge(self._law, prefixes, proposals, logits, noise)

    def choose(self, index: int, proposals: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The token `[R, 1]` at one position of the round, from the target's processed scores `[R, 1, V]`."""
        if self._noise is None:
            return choose(scores)
        values, tokens = race(scores, self._noise[:, index : index + 1])
        check_drawn(not bool(values.isnan().any()))
        return tokens

    def end(self, num_steps: int) -> None:
        """The call ends; plain generation would have made this many steps by now."""
        if self._steps is not None:
            self._steps.end(num_steps)

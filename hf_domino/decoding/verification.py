"""Verification: how many proposals are accepted, and the target's own next token.

A position's token is the likeliest one or, where the target samples, the one that its noise makes it draw. Drafts were
chosen under the same noise and are accepted while they are that token: the text is the one of plain `generate`, with
the same seed where it samples (arXiv 2408.07978). Greedy is the case without noise. The other rule, which accepts more
and writes other texts of the same law, is in `residual`.

Shapes: B rows of the batch, R rows still generated, P proposals, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_domino.decoding.noise import DraftNoise, StepNoise
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw, choose, race
from hf_domino.decoding.tree import Tree


@dataclass(frozen=True)
class Verification:
    """What was decided on a round's proposals, and by which scores."""

    scores: torch.Tensor  # the target's, processed, of the anchor's position and each node's, [R, W, V]
    # Everything the host must know, to be read at once: of each row how many tokens are committed, then these, accepted
    # proposals and the bonus token, and anything behind them, [R, 1 + C + 1]. A count of 0 says that none can be drawn.
    decided: torch.Tensor
    path: torch.Tensor | None = None  # the position that each token was chosen at, [R, C + 1]; None for a chain

    @property
    def tokens(self) -> torch.Tensor:
        """Accepted proposals and the bonus token, `[R, C + 1]`."""
        return self.decided[:, 1:]


def verify(
    law: TokenLaw,
    prefixes: Prefixes,
    proposals: Tree,
    logits: torch.Tensor,  # [R, W, V]
    noise: torch.Tensor | None,  # of the steps from the anchor's on, [R, C + 1, V]; None for the likeliest tokens
) -> Verification:
    """Verify a round from the target's logits under the coupled rule, without a synchronisation."""
    scores = law.scores_behind(lambda: proposals.seen_by(prefixes), prefixes, logits)
    # [R, W] both. Wrong branches have tokens too, which are passed over.
    values, chosen = (None, choose(scores)) if noise is None else proposals.race(scores, noise)
    if not proposals.num_nodes:
        counts = torch.ones_like(chosen) if values is None else (values == values).to(chosen.dtype)  # no NaN
        return Verification(scores, torch.cat((counts, chosen), dim=1))
    accepted, path = proposals.accepted(chosen)
    if path is not None:
        chosen = chosen.gather(1, path)
        values = None if values is None else values.gather(1, path)
    counts = accepted + 1
    if values is not None:  # what was drafted behind a text's end need not have a law
        counts = counts * (values.isnan().cumsum(dim=1).gather(1, accepted) == 0)
    return Verification(scores, torch.cat((counts, chosen), dim=1), path)


def check_drawn(is_drawn: bool) -> None:
    """Raise as `torch.multinomial` does where there is no law to draw from."""
    if not is_drawn:
        raise RuntimeError(
            "No token can be drawn: the target's processed scores are NaN or infinite, or all tokens are forbidden. "
            "generate fails here without a drafter, too; look at the logits processors, or run the target in bfloat16 "
            "or float32 if it overflows."
        )


class Rule:
    """What accepts the proposals of one call: by the coupled rule, what the target chooses itself.

    `begin` comes once, before the first token is chosen, and `end` once, after the last. In between each round calls
    `begin_round` before it proposes, and then either `verify`, for all positions together, or `choose` for one position
    after the other. The first token of all is chosen by `choose`, without a round.
    """

    is_coupled = True  # whether it verifies trees, and gives the same text by `choose` as by `verify`

    def __init__(self, law: TokenLaw, do_sample: bool):
        self.law, self._do_sample = law, do_sample
        self._steps: StepNoise | None = None
        self._noise: torch.Tensor | None = None  # of the round's steps, [R, P + 1, V]; None where it does not sample
        self._prompt_length = 0

    @property
    def draft_noise(self) -> DraftNoise | None:
        """What the round's proposals are chosen with; None for the likeliest tokens."""
        return self._noise

    def begin(self, prefixes: Prefixes, vocab_size: int) -> None:
        """Begin the noise of a call, and of its first step."""
        if self._do_sample:
            self._prompt_length, longest = prefixes.lengths[0], self.law.stops.max_length
            num_steps = None if longest is None else max(longest - self._prompt_length, 1)
            device = prefixes.ids.device
            self._steps = StepNoise(len(prefixes.rows), vocab_size, device, num_steps)
        self.begin_round(prefixes, 0)

    def begin_round(self, prefixes: Prefixes, most: int) -> None:
        """Take the noise of as many steps as the round of at most so many proposals may bring tokens."""
        if self._steps is not None:
            steps = [length - self._prompt_length for length in prefixes.lengths]
            self._noise = self._steps.ahead(prefixes.rows, steps, most + 1)

    def verify(self, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor) -> Verification:
        """Verify the round's proposals from the target's logits `[R, W, V]`."""
        noise = None if self._noise is None else self._noise[:, : proposals.depth + 1]
        return self.law.run("judge", verify, prefixes, proposals, logits, noise)

    def choose(self, index: int, proposals: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Choose the token `[R, 1]` at one position of the round, by the target's processed scores `[R, 1, V]`."""
        if self._noise is None:
            return choose(scores)
        values, tokens = race(scores, self._noise[:, index : index + 1])
        check_drawn(not bool(values.isnan().any()))
        return tokens

    def end(self, num_steps: int) -> None:
        """Leave the default generator behind what plain generation draws for so many steps."""
        if self._steps is not None:
            self._steps.end(num_steps)

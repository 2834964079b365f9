"""What an evaluation says of backbone and correction head: acceptance by draft position, and what the head is worth.

Acceptance here is teacher-forced, over the anchors that the losses are read at; rows are what its error is counted by,
as blocks of one row resemble each other.

Shapes: B batch, N blocks per row, K block size, P proposals.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from hf_domino._common.notices import notice
from hf_domino.configuration import DominoConfig
from hf_domino.training.evidence.meter import TrainingMeter, accepted_runs, complete_blocks
from hf_domino.training.objective.objective import ScoredBatch

LEAST_GAIN = 0.02  # tokens a round; a head that brings less does not pay for its own steps
SURE_BY = 2.0  # standard errors
FEWEST_ROWS = 8  # fewer say nothing either way
NO_GAIN = (
    "the correction head does not beat the base logits on held-out text: {:+.3f} ± {:.3f} tokens a round, with "
    "lambda_base at {:.2f}. It needs more steps with the base loss beside it: raise max_steps or num_train_epochs, and "
    "leave lambda_base_decay_ratio at 1. If base_loss hardly falls either, look at the labels: shift_label, "
    "target_layer_ids and the chat template must be those of the text."
)


class HeadGain(NamedTuple):
    """Tokens a round that the correction head adds to what the base logits would have accepted.

    Args:
        mean (`float`): Over all blocks.
        error (`float`): `SURE_BY` standard errors; infinite for fewer than `FEWEST_ROWS` rows.
    """

    mean: float
    error: float

    def warn(self, lambda_base: float) -> None:
        """Say so where it is sure that the head does not beat the base, once half of the curriculum is over.

        Args:
            lambda_base (`float`): Weight of the base loss; while it is high, the head is not what is trained.
        """
        if lambda_base < 0.5 and self.mean + self.error < LEAST_GAIN:
            notice(NO_GAIN.format(self.mean, self.error, lambda_base))


class EvaluationMeter(TrainingMeter):
    """A meter that also counts by draft position, with the correction head and without.

    Args:
        config (`DominoConfig`): The drafter's.
        device (`torch.device`): Where the sums are kept.
    """

    def __init__(self, config: DominoConfig, device: torch.device):
        super().__init__(config.label_offset, device)
        self._has_head = config.kind.has_correction_head
        self._places = torch.arange(config.num_draft_tokens + 1, device=device)
        # Blocks with at least 0, 1, ..., P proposals right, of base and corrected logits.
        self._survivors = torch.zeros(2, config.num_draft_tokens + 1, device=device, dtype=torch.int64)
        # Over rows: their number, and sums of gain, blocks, gain squared, gain times blocks, blocks squared.
        self._moments = torch.zeros(6, device=device, dtype=torch.int64)

    def add(self, scored: ScoredBatch, total: torch.Tensor | float = 1.0) -> None:
        """Add one batch, as [`TrainingMeter`] does; call it where no gradients are followed."""
        super().add(scored, total)
        complete = complete_blocks(scored.weights, self.label_offset)
        runs = torch.stack(
            [accepted_runs(hits, self.label_offset) for hits in (scored.is_base_correct, scored.is_correct)]
        )  # [2, B, N]
        self._survivors += ((runs[..., None] >= self._places) & complete[..., None]).sum(dim=(1, 2))
        gains, blocks = ((runs[1] - runs[0]) * complete).sum(dim=1), complete.sum(dim=1)  # [B]
        moments = blocks > 0, gains, blocks, gains**2, gains * blocks, blocks**2
        self._moments += torch.stack([values.sum() for values in moments])

    def means(self, accelerator: Any) -> dict[str, float]:
        """What [`TrainingMeter`] gives, and by draft position; every process must call.

        Returns:
            `dict[str, float]`: Also `accept_at_1` to `accept_at_P`, the share of proposals that are right where all
            before them are. With a correction head, `base_acceptance_length` and `base_accept_at_1` to
            `base_accept_at_P` are those of the base logits.
        """
        base, corrected = accelerator.reduce(self._survivors.clone(), "sum").tolist()
        means = super().means(accelerator) | _by_position(corrected)
        if not (self._has_head and base[0]):
            return means
        of_base = {"acceptance_length": sum(base) / base[0]} | _by_position(base)
        return means | {f"base_{name}": value for name, value in of_base.items()}

    def head_gain(self, accelerator: Any) -> HeadGain:
        """What the correction head is worth, with its sampling error; every process must call."""
        rows, gain, blocks, squares, products, block_squares = accelerator.reduce(self._moments.clone(), "sum").tolist()
        mean = gain / max(blocks, 1)
        if rows < FEWEST_ROWS:
            return HeadGain(mean, math.inf)
        spread = (squares - 2 * mean * products + mean**2 * block_squares) * rows / (rows - 1)
        return HeadGain(mean, SURE_BY * math.sqrt(max(spread, 0.0)) / blocks)


def _by_position(survivors: list[float]) -> dict[str, float]:
    """Shares by position, numbered from 1; positions that no block reached are left out."""
    pairs = enumerate(pairwise(survivors), start=1)
    return {f"accept_at_{place}": after / before for place, (before, after) in pairs if before}

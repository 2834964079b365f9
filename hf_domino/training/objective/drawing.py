"""What a training row teaches in a step is drawn while rows are collated, on a CPU: no device is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hf_domino.kinds.view import UNUSED
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.objective.anchors import OWN_PREFIX_STREAM, TRAINING_STREAM, sample_anchors
from hf_domino.training.objective.own_prefixes import choose_own_prefixes


class DrawingCollator:
    """Collates training rows, and draws their anchors.

    Args:
        collate (`Callable`): Makes a batch of rows, with `input_ids`, `loss_mask` and `attention_mask` `[B, S]`.
        args (`DominoTrainingArguments`): For `num_anchors`, `own_prefix_share` and `seed`.

    Attributes:
        epoch (`torch.Tensor`): Scalar, of the rows that are collated next; in memory that a data loader's processes
            share.
    """

    def __init__(self, collate: Callable[[Any], dict[str, torch.Tensor]], args: DominoTrainingArguments):
        self.collate, self._args = collate, args
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __call__(self, rows: Any) -> dict[str, torch.Tensor]:
        """A batch of rows with `anchors`, and `own_prefixes` where a share of blocks has them, both `[B, N]`."""
        batch, args, epoch = self.collate(rows), self._args, int(self.epoch)
        anchors = sample_anchors(batch, args.num_anchors, args.seed, TRAINING_STREAM, epoch)
        # Of one shape whatever the text is, for devices that run what was recorded.
        spare = (0, args.num_anchors - anchors.shape[1] if args.is_static else 0)
        drawn = {"anchors": F.pad(anchors, spare, value=UNUSED)}
        if share := args.own_prefix_share:
            drawn["own_prefixes"] = F.pad(
                choose_own_prefixes(batch | {"anchors": anchors}, share, args.seed, OWN_PREFIX_STREAM, epoch), spare
            )
        return batch | drawn

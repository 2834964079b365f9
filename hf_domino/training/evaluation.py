"""The evaluating half of the trainer: losses over fixed anchors, and acceptance in walked rounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target import TargetModel
from hf_domino.training.acceptance import mean_acceptance_length, walk_acceptance
from hf_domino.training.anchors import sample_anchors_by_content
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.checkpoints import CheckpointingTrainer
from hf_domino.training.hidden_states.reading import STATES
from hf_domino.training.meter import TrainingMeter
from hf_domino.training.objective import Batch, Objective

EVALUATION_STREAM = 1  # keeps the anchors of evaluation apart from those of training


class EvaluatingTrainer(CheckpointingTrainer):
    """Scores held-out text as training does, and walks real rounds over it."""

    args: DominoTrainingArguments
    drafter: DominoDraftModel
    target: TargetModel
    objective: Objective

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Score one evaluation batch; sums go to the evaluation's meter."""
        inputs = self._prepare_inputs(inputs)
        inputs["loss_mask"][self._num_own_rows(len(inputs["loss_mask"])) :] = 0
        inputs["anchors"] = sample_anchors_by_content(inputs, self.args.num_anchors, self.args.seed, EVALUATION_STREAM)
        with torch.no_grad():
            losses, is_correct, weights = model(within=partial(self.objective.score, inputs))
        self._evaluation_meter.add(losses, is_correct, weights)
        return losses.corrected / weights.sum().clamp(min=1e-6), None, None

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the same anchors every time, then walk real rounds over the first `walk_rows` rows."""
        self._evaluation_meter = TrainingMeter(self.drafter.config.label_offset, self.args.device)
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        metrics = self._evaluation_meter.means(self.accelerator)
        metrics["loss"] = metrics["corrected_loss"]
        if self.args.walk_rows:
            metrics |= self._walk(dataloader.dataset)
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _num_own_rows(self, batch_size: int) -> int:
        """Rows of an evaluation batch that count: with several processes, the last batches repeat the first rows."""
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return batch_size
        return min(max(state.remainder - self.args.process_index * batch_size, 0), batch_size)

    def _walk(self, dataset: Any) -> dict[str, float]:
        rows = [dataset[index] for index in range(min(self.args.walk_rows, len(dataset)))]
        starts = [max(1, row["loss_mask"].index(1)) for row in rows]
        # Without autocast, as generation runs.
        texts, states = ([row.get(field) for row in rows] for field in ("input_ids", STATES))
        walked = walk_acceptance(self.drafter, self.target.model, texts, starts, states)
        mean = mean_acceptance_length(walked)
        return {} if mean is None else {"walked_acceptance_length": mean}

"""The evaluating half of the trainer: losses and acceptance over fixed anchors, walked rounds, what they are worth."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.view import TargetModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.evidence.acceptance import mean_acceptance_length, walk_rounds
from hf_domino.training.evidence.evidence import EvaluationMeter
from hf_domino.training.evidence.speed import RoundCost, measure_round
from hf_domino.training.hidden_states.reading import STATES
from hf_domino.training.objective.anchors import EVALUATION_STREAM, sample_anchors
from hf_domino.training.objective.losses import lambda_base_at
from hf_domino.training.objective.objective import Batch, Objective
from hf_domino.training.runs.checkpoints import CheckpointingTrainer
from hf_domino.training.scale.placing import is_in_memory


class EvaluatingTrainer(CheckpointingTrainer):
    """Scores held-out text as training does, and walks real rounds over it."""

    args: DominoTrainingArguments
    drafter: DominoDraftModel
    target: TargetModel
    objective: Objective
    _round_cost: RoundCost | None = None

    def prediction_step(
        self, model: nn.Module, inputs: Batch, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor, None, None]:
        """Score one evaluation batch; sums go to the evaluation's meter."""
        inputs = self._prepare_inputs(inputs)
        inputs["loss_mask"][self._num_own_rows(len(inputs["loss_mask"])) :] = 0
        inputs["anchors"] = sample_anchors(inputs, self.args.num_anchors, self.args.seed, EVALUATION_STREAM)
        with torch.no_grad():
            scored = model(within=partial(self.objective.score, inputs))
        self._evaluation_meter.add(scored)
        return scored.losses.corrected / scored.loss_weight.clamp(min=1e-6), None, None

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate with the same anchors every time, then walk real rounds over the first `walk_rows` rows."""
        meter = self._evaluation_meter = EvaluationMeter(self.drafter.config, self.args.device)
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        metrics = meter.means(self.accelerator)
        metrics["loss"] = metrics["corrected_loss"]
        if self.drafter.has_correction_head:
            meter.head_gain(self.accelerator).warn(self.lambda_base(self.state.global_step))
        if self.args.walk_rows:
            metrics |= self._walk(dataloader.dataset)
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def lambda_base(self, step: int) -> float:
        """Weight of the base loss in a step, counted from 0; none where the backbone stays as it is."""
        if self.args.train_only == "head":
            return 0.0
        return lambda_base_at(
            step, self.state.max_steps, self.args.lambda_base_decay_ratio, self.args.lambda_base_start
        )

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
        walk = torch.autocast(self.args.device.type, enabled=False)(walk_rounds)
        # Inside its forward, where sharded weights are gathered: all processes walk the same rows.
        walked = self.drafter(within=partial(walk, self.drafter, self.target.model, texts, starts, states))
        mean, of_base = mean_acceptance_length(walked.corrected), mean_acceptance_length(walked.base)
        if mean is None or of_base is None:
            return {}
        metrics = {"walked_acceptance_length": mean}
        if self.drafter.has_correction_head:
            metrics["base_walked_acceptance_length"] = of_base
        # Where only the target's ends are in memory, its speed would be the disk's.
        if self.args.predict_speed_up and states[0] is None and is_in_memory(self.target.model):
            cost = self._measure_round(texts[0])
            metrics |= {"predicted_speed_up": cost.speed_up(mean), "step_ms": 1e3 * cost.step}
            metrics["round_ms"] = 1e3 * cost.round
        return metrics

    def _measure_round(self, prompt: list[int]) -> RoundCost:
        if self._round_cost is None:
            self._round_cost = measure_round(self.target.model, self.drafter.config, prompt, self.args.device)
        return self._round_cost

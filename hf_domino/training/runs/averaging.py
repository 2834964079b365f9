"""A running average of the drafter's weights over the steps, evaluated and saved in place of the last step's.

The average is an exponential one: after each step it moves by 1 - `ema_decay` towards the weights. Checkpoints hold
both: the average as the drafter, and what training goes on from beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback

from hf_domino._common.refusal import refusal
from hf_domino.training.evidence.evaluation import EvaluatingTrainer

LAST_STEP = "last_step.safetensors"  # weights of the last step, beside the average


class WeightAverage(TrainerCallback):
    """The average of a model's trained weights; follows every optimizer step.

    Args:
        model (`nn.Module`): What is trained.
        decay (`float`): Share of the average that a step keeps, in (0, 1).
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        self._weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._average: list[torch.Tensor] = []
        self._move = get_ema_multi_avg_fn(decay)

    def restart(self) -> None:
        """Make the weights as they are now the average."""
        self._average = [weight.detach().clone() for weight in self._weights.values()]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Begin with the first weights, unless a checkpoint brought an average."""
        if not self._average:
            self.restart()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Move towards the weights after an optimizer step."""
        self._move(self._average, list(self._weights.values()), 0)

    @contextmanager
    def in_place(self) -> Iterator[dict[str, torch.Tensor]]:
        """Put the average into the model for a while; gives the weights of the last step by their names."""
        if not self._average:
            yield {}
            return
        last = [weight.detach().clone() for weight in self._weights.values()]
        self._set(self._average)
        try:
            yield dict(zip(self._weights, last, strict=True))
        finally:
            self._set(last)

    def go_on_from(self, weights: dict[str, torch.Tensor]) -> None:
        """Keep the model's weights as the average, and put the given ones into it."""
        self.restart()
        self._set([weights[name] for name in self._weights])

    def settle(self) -> None:
        """Put the average into the model for good."""
        self._set(self._average)

    @torch.no_grad()
    def _set(self, values: list[torch.Tensor]) -> None:
        for weight, value in zip(self._weights.values(), values, strict=True):
            weight.copy_(value)


class AveragingTrainer(EvaluatingTrainer):
    """Evaluates and saves the average of the weights where `ema_decay` asks for one."""

    average: WeightAverage | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.args.ema_decay is None:
            return
        if self.is_fsdp_enabled:
            remedy = "The average is of whole weights; train with one process or DDP, or without it."
            raise refusal("ema_decay with FSDP", None, self.args.ema_decay, remedy)
        self.average = WeightAverage(self.model, self.args.ema_decay)
        self.add_callback(self.average)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as [`~transformers.Trainer.train`] does; the drafter ends with the average."""
        output = super().train(*args, **kwargs)
        if self.average is not None:
            self.average.settle()
        return output

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the average."""
        with self._averaged():
            return super().evaluation_loop(*args, **kwargs)

    def _save(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        with self._averaged() as last:
            super()._save(output_dir, *args, **kwargs)
            if last and self._is_saving:  # a checkpoint
                save_file(last, Path(output_dir or str(self.args.output_dir)) / LAST_STEP)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.average is not None:
            self.average.go_on_from(load_file(Path(resume_from_checkpoint) / LAST_STEP))

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if self.average is not None:
            self.average.restart()

    @contextmanager
    def _averaged(self) -> Iterator[dict[str, torch.Tensor]]:
        if self.average is None:
            yield {}
            return
        with self.average.in_place() as last:
            yield last

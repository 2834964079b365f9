"""Running figures of training and evaluation, kept on the device until they are logged.

Acceptance here is teacher-forced, over the anchors that the losses are read at.

Shapes: B batch, N blocks per row, K block size, P proposals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback

from hf_domino._common.notices import notice
from hf_domino.configuration import DominoConfig
from hf_domino.training.objective.objective import ScoredBatch

# What fits into a line of the terminal; all that is logged is in trainer_state.json.
SHOWN = (
    *("train_runtime", "train_loss", "loss", "learning_rate", "lambda_base", "acceptance_length"),
    *("eval_loss", "eval_walked_acceptance_length", "epoch"),
)
LEAST_GAIN = 0.02  # tokens a round; a head that brings less does not pay for its own steps
NO_GAIN = (
    "the correction head does not beat the base logits on held-out text: {:+.3f} tokens a round, with lambda_base at "
    "{:.2f}. It needs more steps with the base loss beside it: raise max_steps or num_train_epochs, and leave "
    "lambda_base_decay_ratio at 1. If base_loss hardly falls either, look at the labels: shift_label, target_layer_ids "
    "and the chat template must be those of the text."
)


def accepted_runs(is_correct: torch.Tensor, label_offset: int) -> torch.Tensor:
    """Proposals accepted in each block: the leading run of hits `[..., K]` from `label_offset` on, `[...]` int64."""
    return is_correct[..., label_offset:].long().cumprod(dim=-1).sum(dim=-1)


class TrainingMeter:
    """Sums of losses, weights and accepted tokens since the last reset; blocks whose proposals all count are accepted.

    Args:
        config (`DominoConfig`): The drafter's.
        device (`torch.device`): Where the sums are kept.
    """

    def __init__(self, config: DominoConfig, device: torch.device):
        self.config, self.label_offset = config, config.label_offset
        self._sums = torch.zeros(5, device=device)

    def reset(self) -> None:
        """Forget everything."""
        self._sums.zero_()

    def add(self, scored: ScoredBatch, total: torch.Tensor | float = 1.0) -> None:
        """Add one micro-batch; `total` is the weights of its whole step to average over steps, 1 over positions."""
        complete = self._complete(scored)
        lengths = accepted_runs(scored.is_correct, self.label_offset) + 1
        losses = scored.losses
        shares = torch.stack([losses.base.detach(), losses.corrected.detach(), scored.loss_weight]) / total
        self._sums += torch.cat((shares, torch.stack([(lengths * complete).sum(), complete.sum()])))

    def means(self, accelerator: Any) -> dict[str, float]:
        """Average over everything added, on all processes; every process must call.

        Returns `base_loss`, `corrected_loss`, and `acceptance_length` unless no block was complete.
        """
        base, corrected, weight, tokens, blocks = accelerator.reduce(self._sums.clone(), "sum").tolist()
        means = {"base_loss": base / max(weight, 1e-6), "corrected_loss": corrected / max(weight, 1e-6)}
        return means | ({"acceptance_length": tokens / blocks} if blocks else {})

    def _complete(self, scored: ScoredBatch) -> torch.Tensor:
        """Blocks whose proposals all count, `[B, N]` bool."""
        return (scored.weights[..., self.label_offset :] > 0).all(dim=-1)


class EvaluationMeter(TrainingMeter):
    """A meter that also counts by draft position, with the correction head and without."""

    def __init__(self, config: DominoConfig, device: torch.device):
        super().__init__(config, device)
        self._places = torch.arange(config.num_draft_tokens + 1, device=device)
        # Blocks with at least 0, 1, ..., P proposals right, of base and corrected logits.
        self._survivors = torch.zeros(2, config.num_draft_tokens + 1, device=device, dtype=torch.int64)

    def add(self, scored: ScoredBatch, total: torch.Tensor | float = 1.0) -> None:
        """Add one batch, as [`TrainingMeter`] does; call it where no gradients are followed."""
        super().add(scored, total)
        hits = torch.stack((scored.is_base_correct, scored.is_correct))  # [2, B, N, K]
        runs = accepted_runs(hits, self.label_offset)[..., None]
        self._survivors += ((runs >= self._places) & self._complete(scored)[..., None]).sum(dim=(1, 2))

    def means(self, accelerator: Any) -> dict[str, float]:
        """What [`TrainingMeter`] gives, and `accept_at_1` to `accept_at_P`: right proposals where all before are right.

        With a correction head, `base_acceptance_length` and `base_accept_at_1` to `base_accept_at_P` are those of the
        base logits.
        """
        base, corrected = accelerator.reduce(self._survivors.clone(), "sum").tolist()
        means = super().means(accelerator) | _by_position(corrected)
        means["loss"] = means["corrected_loss"]
        if not (self.config.kind.has_correction_head and base[0]):
            return means
        of_base = {"acceptance_length": sum(base) / base[0]} | _by_position(base)
        return means | {f"base_{name}": value for name, value in of_base.items()}


def _by_position(survivors: list[float]) -> dict[str, float]:
    """Shares by position, numbered from 1; positions that no block reached are left out."""
    pairs = enumerate(pairwise(survivors), start=1)
    return {f"accept_at_{place}": after / before for place, (before, after) in pairs if before}


def warn_of_head(metrics: dict[str, float], lambda_base: float) -> None:
    """Say that a correction head does not beat the base, once the base loss counts less than half."""
    if "base_acceptance_length" in metrics and lambda_base < 0.5:
        gain = metrics["acceptance_length"] - metrics["base_acceptance_length"]
        if gain < LEAST_GAIN:
            notice(NO_GAIN.format(gain, lambda_base))


def show_less(callbacks: Sequence[Any]) -> None:
    """Let a trainer's callbacks print what fits into a line."""
    for callback in callbacks:
        if type(callback) in (PrinterCallback, ProgressCallback):
            vars(callback)["on_log"] = partial(_show, callback.on_log)


def _show(on_log: Callable[..., None], *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
    on_log(*args, logs={name: logs[name] for name in SHOWN if name in logs} or logs, **kwargs)

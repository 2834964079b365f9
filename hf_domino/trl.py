"""Rollouts that draft: a callback for TRL's online trainers, and for others that write rollouts with `generate`."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerState

from hf_domino._common.notices import notice
from hf_domino.integration.default_drafter import attached, detach
from hf_domino.integration.patch import attach
from hf_domino.statistics.stats import DecodingStats

if TYPE_CHECKING:
    from hf_domino.methods import DominoDraftModel


class DraftedRollouts(TrainerCallback):
    """Let a policy draft its rollouts while it is trained, by `GRPOTrainer` or another trainer that calls `generate`.

    Completions and rewards stay what they are without the callback, so it changes the time of a training and nothing
    else. The policy has the drafter as its default drafter (see [`attach`]) from the first step to the last one. If
    training ends with an error, leave the `with` block of the callback, or call [`detach`].

    The log gets `rollout/tokens_per_forward`, `rollout/tokens_per_second`, `rollout/share_paused` (the share of plain
    decode steps because drafting did not pay) and `rollout/drafter_age` (optimizer steps of the policy since the
    drafter was trained). Rollouts of evaluations are logged apart from these, with `eval_` in front. The printed log
    and `trainer_state.json` have these figures. Trackers such as W&B report a log before other callbacks add to it; put
    the callback in front of them with `trainer.callback_handler.callbacks.insert(0, callback)`.

    Args:
        drafter ([`DominoDraftModel`], `str` or `Path`): The drafter, or its folder or Hub name.

    Raises:
        ValueError: When training begins, if the drafter does not fit the policy.

    Example:
    ```python
    >>> from hf_domino.trl import DraftedRollouts
    >>> from trl import GRPOTrainer  # doctest: +SKIP
    >>> trainer = GRPOTrainer(policy, reward, callbacks=[DraftedRollouts("my-drafter")], ...)  # doctest: +SKIP

    ```
    """

    def __init__(self, drafter: DominoDraftModel | str | os.PathLike):
        self.drafter = drafter
        self._policy: Any = None
        # Of the policy's rollouts since the last log, by whether it was training.
        self._sums = {is_training: defaultdict[str, float](float) for is_training in (True, False)}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach the drafter to the policy."""
        self._policy = model
        attach(model, self.drafter)
        default = attached(model)
        assert default is not None
        default.on_call = self._count

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Detach the drafter again."""
        if self._policy is None:
            return
        default = attached(self._policy)
        if state.global_step and default is not None and not default.num_drafted:
            notice(
                f"DraftedRollouts drafted nothing (plain calls: {default.num_plain}): rollouts by vLLM or continuous "
                "batching do not call generate."
            )
        detach(self._policy)
        self._policy = None

    def __enter__(self) -> DraftedRollouts:
        return self

    def __exit__(self, *error: Any) -> None:
        self.on_train_end(None, TrainerState(), None)

    def _count(self, sequences: torch.Tensor, attention_mask: torch.Tensor | None, stats: DecodingStats) -> None:
        """Add a call of `generate` to the figures of the next log."""
        sums = self._sums[self._policy.training]
        sums["rounds"] += stats.num_rounds
        sums["emitted"] += sum(map(sum, stats.rows))
        sums["paused"] += stats.num_paused
        sums["tokens"] += stats.num_new_tokens
        sums["seconds"] += stats.seconds

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, model: Any = None, **kwargs: Any
    ) -> None:
        """Add the figures of the rollouts since the last log to this one."""
        sums = self._sums[model.training]
        if not sums["rounds"]:
            return
        figures = {
            "tokens_per_forward": sums["emitted"] / sums["rounds"],
            "tokens_per_second": sums["tokens"] / sums["seconds"],
            "share_paused": sums["paused"] / sums["rounds"],
            "drafter_age": state.global_step,
        }
        sums.clear()
        prefix = "rollout/"
        if not model.training:
            prefix = "eval_rollout/"
        named = {f"{prefix}{name}": value for name, value in figures.items()}
        # Trainer copies a log into the history before callbacks see it.
        for log in (logs, state.log_history[-1]):
            log |= named

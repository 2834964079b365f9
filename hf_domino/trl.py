"""A callback that drafts the rollouts of TRL's online trainers, and of other trainers that call `generate`."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino.configuration.checks import check_range
from hf_domino.decoding.lookup_memory import LookupMemory, check_memory
from hf_domino.integration.default_drafter import Attached, attached, replace_default
from hf_domino.integration.patch import attach
from hf_domino.stats.decoding_stats import DecodingStats
from hf_domino.targets.compatibility import unwrapped
from hf_domino.training.following import Follower

if TYPE_CHECKING:
    from hf_domino.methods import DominoDraftModel


class DraftedRollouts(TrainerCallback, AbstractContextManager):
    """Callback that drafts a policy's rollouts, for `GRPOTrainer` and other trainers that call `generate`.

    Completions and rewards are the same as without the callback; only the training time changes. A policy with dropout
    is an exception: its forwards draw random numbers, and drafting changes how many forwards there are.

    From the first step to the last, the drafter is the policy's default drafter (see [`attach`]), in place of the one
    that the policy had before. If you want to go on using the policy after training has failed, train inside the `with`
    block of the callback, which always puts back what the policy had.

    With `update_every`, the drafter follows the policy: it is trained on the newest rollouts, in place and in fp32. If
    you pass a name, this is a drafter that nothing else uses.
    Each checkpoint then has a folder `drafter` with the drafter, its optimizer and these rollouts. If you resume
    training from a checkpoint in `output_dir`, they are restored.

    Rollouts also use prompt lookup in earlier rollouts, above all in other answers to the same prompt. The training has
    a memory of its own for this, which is not part of checkpoints.

    The callback adds these figures to the training logs: `rollout/tokens_per_forward`, `rollout/tokens_per_second`,
    `rollout/share_paused` (the share of rounds that were plain decode steps because drafting did not pay off),
    `rollout/drafter_age` (optimizer steps of the policy since the drafter was last trained) and, with `update_every`,
    `rollout/update_seconds`. They appear in the printed log and in `trainer_state.json`. Trackers such as W&B report a
    log before callbacks that run after them can add to it, so put this callback first with
    `trainer.callback_handler.callbacks.insert(0, callback)`.

    Args:
        drafter ([`DominoDraftModel`], `str` or `Path`): The drafter, or its folder or Hub name.
        update_every (`int`, *optional*, defaults to 0): Optimizer steps of the policy between updates of the drafter; 0
            leaves the drafter as it is.
        update_steps (`int`, *optional*, defaults to 4): Optimizer steps of the drafter in an update, each on
            `per_device_train_batch_size` rollouts.
        buffer_tokens (`int`, *optional*, defaults to 16384): Maximum size of the buffer of rollouts that updates choose
            from, in tokens, prompts included. The newest rollout is kept even if it is longer.
        learning_rate (`float`, *optional*, defaults to 5e-4): Learning rate of these updates.
        memory ([`LookupMemory`] or `bool`, *optional*, defaults to `True`): The memory for prompt lookup, which is the
            drafter's `memory` during the training. `True` makes a new one, and `False` leaves the drafter's own, which
            usually is none.

    Raises:
        ValueError: If a number is out of range, or, when training begins, if the drafter does not fit the policy or
            cannot follow it.

    Example:
    ```python
    >>> from hf_domino.trl import DraftedRollouts
    >>> callback = DraftedRollouts("my-drafter", update_every=4)
    >>> from trl import GRPOTrainer  # doctest: +SKIP
    >>> trainer = GRPOTrainer(policy, reward, callbacks=[callback], ...)  # doctest: +SKIP

    ```
    """

    def __init__(
        self,
        drafter: DominoDraftModel | str | os.PathLike,
        update_every: int = 0,
        update_steps: int = 4,
        buffer_tokens: int = 16384,
        learning_rate: float = 5e-4,
        memory: LookupMemory | bool = True,
    ):
        check_range("update_every", update_every, 0, hint="0 to leave the drafter as it is")
        check_range("update_steps", update_steps, 1, hint="left out: 4")
        check_range("buffer_tokens", buffer_tokens, 2, hint="left out: 16384")
        check_range("learning_rate", learning_rate, 1e-12, 1, hint="left out: 5e-4", is_whole=False)
        self.drafter = drafter
        self.update_every = update_every
        self.update_steps = update_steps
        self.buffer_tokens = buffer_tokens
        self.learning_rate = learning_rate
        if not isinstance(memory, bool):
            check_memory(memory, "memory")
        self.memory = memory
        self._policy: Any = None
        self._default: Attached | None = None
        self._default_before: Attached | None = None
        self._memory_before: LookupMemory | None = None
        self._follower: Follower | None = None
        self._begin_log()

    def _begin_log(self) -> None:
        """Reset the counts for the next log."""
        self._stats = DecodingStats(0)
        self._update_seconds = 0.0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attach the drafter to the policy, and restore its state if training resumes from a checkpoint."""
        self.__exit__()  # a training that failed may have left its drafter
        before = attached(model)
        attach(model, self.drafter)
        self._policy = model
        self._default_before = before
        if dropouts := _dropouts(unwrapped(model)):
            notice(
                f"DraftedRollouts: the policy has dropout ({', '.join(dropouts)}), which draws random numbers in each "
                "forward while it is trained. With drafts there are other forwards, so completions and trained weights "
                "differ from those without the callback. disable_dropout=True of TRL's trainers, lora_dropout=0 and "
                "attention_dropout=0 keep them the same."
            )
        default = attached(model)
        assert default is not None
        self._default = default
        self._memory_before = default.drafter.memory
        if self.memory is True:
            default.drafter.memory = LookupMemory()
        elif isinstance(self.memory, LookupMemory):
            default.drafter.memory = self.memory
        default.drafter.to(model.device)
        default.on_call = self._count
        if self.update_every:
            if args.world_size > 1:
                remedy = "Leave it out: the drafter stays as it is then."
                raise invalid_argument("update_every with several processes", 0, self.update_every, remedy)
            self._follower = Follower(default.drafter, unwrapped(model), self.learning_rate, self.buffer_tokens)
            self._follower.load(_folder(args, state))

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Train the drafter before the rollouts of the step, if an update is due."""
        if self._follower is not None and state.global_step % self.update_every == 0:
            start = time.perf_counter()
            self._follower.update(state.global_step, self.update_steps, args.per_device_train_batch_size)
            self._update_seconds += time.perf_counter() - start

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Save the drafter in the policy's checkpoint if it follows the policy."""
        if self._follower is not None:
            self._follower.save(_folder(args, state))

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Detach the drafter, and warn if it drafted nothing."""
        default = self._default
        if default is not None and not default.num_drafted:
            notice(
                f"DraftedRollouts drafted nothing (plain calls: {default.num_plain}): rollouts by vLLM or continuous "
                "batching do not call generate."
            )
        self.__exit__()

    def __exit__(self, *error: Any) -> None:
        if self._default is not None:
            self._default.drafter.memory = self._memory_before
            replace_default(self._policy, self._default, self._default_before)
        self._policy = self._default = self._default_before = self._follower = None

    def _count(self, sequences: torch.Tensor, attention_mask: torch.Tensor | None, stats: DecodingStats) -> None:
        """Count a `generate` call of the training for the next log, and keep its sequences to train the drafter on."""
        if not self._policy.training:
            return
        total = self._stats
        total.rows += stats.rows
        total.num_paused += stats.num_paused
        total.num_new_tokens += stats.num_new_tokens
        total.seconds += stats.seconds
        if self._follower is not None:
            # The first token of a sequence is emitted before its first round.
            self._follower.add(sequences, attention_mask, [1 + sum(lengths) for lengths in stats.rows])

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the figures of the rollouts since the last log to a training log."""
        stats = self._stats
        if "loss" not in logs or not stats.num_rounds:
            return
        figures = {
            "rollout/tokens_per_forward": stats.tokens_per_forward,
            "rollout/tokens_per_second": stats.tokens_per_second,
            "rollout/share_paused": stats.num_paused / stats.num_rounds,
            "rollout/drafter_age": state.global_step,
        }
        if self._follower is not None:
            figures["rollout/drafter_age"] -= self._follower.updated_at
            figures["rollout/update_seconds"] = self._update_seconds
        self._begin_log()
        # Trainer copies a log into the history before callbacks see it.
        for log in (logs, state.log_history[-1]):
            log.update(figures)


def _dropouts(policy: nn.Module) -> list[str]:
    """Describe the dropout of a policy: each class of modules that has any, with the largest probability."""
    found = dict[str, float]()
    for module in policy.modules():
        probabilities = [value for name, value in vars(module).items() if "dropout" in name]
        if isinstance(module, nn.modules.dropout._DropoutNd):
            probabilities.append(module.p)
        most = max((value for value in probabilities if isinstance(value, float)), default=0.0)
        if most > 0:
            name = type(module).__name__
            found[name] = max(most, found.get(name, 0.0))
    return [f"{name}: {probability:g}" for name, probability in found.items()]


def _folder(args: Any, state: TrainerState) -> Path:
    """Return the drafter's folder in the checkpoint of the current step."""
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", "drafter")

"""What a training is going to take: said before it begins, and chosen for a number of minutes.

A step's time grows with the blocks it trains. So two small numbers of anchors are timed, over copies that are thrown
away, and a line through both says how many anchors leave enough steps for the time there is.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from hf_domino._common.notices import notice
from hf_domino._common.refusal import refusal
from hf_domino.methods import DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer

ENOUGH_STEPS = 400  # with fewer a new drafter learns more from fewer blocks in each
LEAST_ANCHORS = 24  # of a sequence: with fewer, most of a step is the target's forward
TIMED_ANCHORS = (LEAST_ANCHORS // 2, 2 * LEAST_ANCHORS)
TIMED_STEPS = 2  # after a first one, which allocates
AT_THE_END = 0.1  # share of the time for the evaluation and for saving
LARGE_VOCABULARY = 100_000
USUAL_DRAFT_VOCABULARY = 32_768


@dataclass(frozen=True)
class Plan:
    """How a training uses its time."""

    num_anchors: int
    num_steps: int
    seconds_per_step: float

    def __str__(self) -> str:
        minutes = self.num_steps * self.seconds_per_step / 60
        return (
            f"{self.num_steps} steps of about {self.seconds_per_step:.2f} s, {minutes:.1f} minutes in all, with up to "
            f"{self.num_anchors} blocks of each sequence (num_anchors)"
        )


def plan_for(seconds: float, seconds_of: dict[int, float], most_anchors: int) -> Plan:
    """Choose anchors and steps for a time.

    Args:
        seconds (`float`): What steps may take in all.
        seconds_of (`dict[int, float]`): Measured seconds of a step, by two numbers of anchors.
        most_anchors (`int`): No more than these.

    Example:
    ```python
    >>> from hf_domino.training.plan import plan_for
    >>> plan_for(600.0, {12: 0.75, 44: 1.75}, 256)
    Plan(num_anchors=36, num_steps=400, seconds_per_step=1.5)

    ```
    """
    (few, fast), (many, slow) = sorted(seconds_of.items())
    per_anchor = max(slow - fast, 0.0) / (many - few)
    beside = max(fast - per_anchor * few, 0.0)
    affordable = most_anchors
    if per_anchor:
        affordable = int((seconds / ENOUGH_STEPS - beside) / per_anchor + 1e-9)
    num_anchors = max(min(affordable, most_anchors), min(LEAST_ANCHORS, most_anchors))
    a_step = beside + per_anchor * num_anchors
    return Plan(num_anchors, max(int(seconds / max(a_step, 1e-9)), 1), round(a_step, 6))


def follow_minutes(
    drafter: DominoDraftModel, target: PreTrainedModel, args: DominoTrainingArguments, rows: Any, since: float
) -> Plan:
    """Time a few steps, set `num_anchors` and `max_steps` of the arguments to what fits, and say so.

    Args:
        drafter ([`DominoDraftModel`]): The drafter, which stays as it is.
        target (`PreTrainedModel`): Its target.
        args ([`DominoTrainingArguments`]): With `minutes`.
        rows: The rows to train on.
        since (`float`): When the minutes began, by `time.perf_counter`.
    """
    assert args.minutes is not None
    seconds_of = {anchors: _seconds_of_step(drafter, target, args, rows, anchors) for anchors in TIMED_ANCHORS}
    seconds = 60 * args.minutes * (1 - AT_THE_END) - (time.perf_counter() - since)
    slowest = max(seconds_of.values())
    if seconds < slowest:
        remedy = f"A step takes {slowest:.1f} s here, and loading and timing took the rest: allow more minutes."
        raise refusal("minutes", "enough for a step", args.minutes, remedy)
    plan = plan_for(seconds, seconds_of, args.num_anchors)
    args.num_anchors = plan.num_anchors
    args.max_steps = plan.num_steps
    notice(f"the plan for {args.minutes:g} minutes: {plan}.")
    return plan


def _seconds_of_step(
    drafter: DominoDraftModel, target: PreTrainedModel, args: DominoTrainingArguments, rows: Any, num_anchors: int
) -> float:
    """Median time of a step with so many anchors, over a copy of the drafter."""
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        scratch = copy.copy(args)
        scratch.output_dir = folder
        scratch.num_anchors = num_anchors
        scratch.max_steps = TIMED_STEPS + 1
        scratch.disable_tqdm = True
        scratch.enable_jit_checkpoint = False
        scratch.report_to = []
        scratch.save_strategy = scratch.eval_strategy = scratch.logging_strategy = "no"
        trainer = DominoTrainer(copy.deepcopy(drafter), target, scratch, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return statistics.median(clock.seconds[1:])


class _Clock(TrainerCallback):
    """Times steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note when the step begins."""
        self._start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note how long it took."""
        self.seconds.append(time.perf_counter() - self._start)


class StopInTime(TrainerCallback):
    """Ends a training whose minutes are over though its steps are not: the machine has become slower.

    Args:
        end (`float`): When, by `time.perf_counter`.
    """

    def __init__(self, end: float):
        self._end = end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the training if the time is over."""
        if time.perf_counter() > self._end and state.global_step < state.max_steps:
            control.should_training_stop = True
            notice(
                f"the {args.minutes:g} minutes are over after {state.global_step} of {state.max_steps} steps: the "
                "machine became slower than when its steps were timed. The learning rate has not decayed to its end."
            )
            state.max_steps = state.global_step


def say_what_it_takes(trainer: DominoTrainer) -> None:
    """Say how much text there is, how many steps, and how large the drafter is."""
    args = trainer.args
    rows: Any = trainer.train_dataset
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps if args.max_steps > 0 else round(args.num_train_epochs * len(rows) / per_step)
    counts = getattr(rows, "counts", None)
    tokens = "" if counts is None else f" with {counts.tokens:,} tokens"
    config = trainer.drafter.config
    size = trainer.drafter.num_parameters()
    trained = trainer.drafter.num_parameters(only_trainable=True)
    memory = 4 * (size + 3 * trained) / 1e9  # fp32: weights; gradients and two moments of what is trained
    notice(
        f"training on {len(rows):,} sequences{tokens}: about {steps:,} steps of {per_step}. The drafter has "
        f"{size / 1e6:.1f} million parameters; with gradients and optimizer it takes {memory:.1f} GB beside the target."
    )
    if config.draft_vocab_size is None and config.vocab_size > LARGE_VOCABULARY:
        notice(
            f"a step spends most of its time on the product with all {config.vocab_size:,} tokens of the target. "
            f"--draft-vocab-size {USUAL_DRAFT_VOCABULARY} only drafts the most frequent ones of the text, many times "
            "as fast."
        )

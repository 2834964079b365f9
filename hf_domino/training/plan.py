"""Report what a training will take before it begins, and plan a training that fits a number of minutes.

The time of a step grows with its examples and with the blocks that it trains. So steps with a few small numbers of both
are timed, on copies of the drafter that are thrown away. From these times, the plan chooses how many examples and
anchors a step can have and still leave enough steps in the given time.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino._common.run_record import Run
from hf_domino.methods import DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.muon import trains_with_muon
from hf_domino.training.resuming import PLANNED
from hf_domino.training.trainer import DominoTrainer

ENOUGH_STEPS = 400  # below this, a new drafter learns more from more steps with fewer examples and blocks
LEAST_ROWS = 4  # examples in a step; with fewer, the optimizer takes much of its time
LEAST_ANCHORS = 16  # anchors of an example; with fewer, the target's forward takes most of the step
TIMED = ((1, LEAST_ANCHORS), (LEAST_ROWS, LEAST_ANCHORS), (LEAST_ROWS, 3 * LEAST_ANCHORS))
TIMED_STEPS = 2  # after a first step, which allocates memory
FOR_EVALUATION = 0.1  # share of the time that is kept for evaluation and saving
FOR_SAVING = 0.02  # the same without evaluation
LARGE_VOCABULARY = 100_000
USUAL_DRAFT_VOCABULARY = 32_768
SHORTEST = 1e-9  # least seconds for which a measured difference counts


def plan_for(seconds: float, timed: Sequence[float], most_rows: int, most_anchors: int) -> dict[str, int]:
    """Choose the numbers of examples, anchors and steps for a given time.

    Args:
        seconds (`float`): Time for all steps together.
        timed (`Sequence[float]`): Measured seconds of three steps: with one example, with `LEAST_ROWS` examples (or
            `most_rows` if that is less), both with `LEAST_ANCHORS` anchors, and with as many examples as the second and
            three times the anchors.
        most_rows (`int`): Maximum number of examples in a step.
        most_anchors (`int`): Maximum number of anchors of an example.

    Returns:
        `dict[str, int]`: Fields of the training arguments.

    Example:
    ```python
    >>> from hf_domino.training.plan import plan_for
    >>> plan_for(610.0, [0.4, 0.85, 1.65], 8, 256)
    {'max_steps': 406, 'per_device_train_batch_size': 8, 'num_anchors': 17}

    ```
    """
    few = min(LEAST_ROWS, most_rows)
    first, second, third = timed
    a_row = max(second - first, SHORTEST) / max(few - 1, 1)  # including its first `LEAST_ANCHORS` anchors
    an_anchor = max(third - second, SHORTEST) / (2 * LEAST_ANCHORS * few)
    a_step = second - few * a_row
    for_rows = seconds / ENOUGH_STEPS - a_step
    num_rows = min(max(int(for_rows / a_row), few), most_rows)
    more_anchors = max(int((for_rows / num_rows - a_row) / an_anchor), 0)
    num_anchors = min(LEAST_ANCHORS + more_anchors, most_anchors)
    taken = max(a_step + num_rows * (a_row + (num_anchors - LEAST_ANCHORS) * an_anchor), min(timed) / 2)
    num_steps = max(int(seconds / taken), 1)
    return {"max_steps": num_steps, "per_device_train_batch_size": num_rows, "num_anchors": num_anchors}


def follow_minutes(
    drafter: DominoDraftModel,
    target: PreTrainedModel,
    args: DominoTrainingArguments,
    rows: Any,
    evaluation: Any,
    since: float,
) -> StopInTime:
    """Time a few steps, set batch size, `num_anchors` and `max_steps` to values that fit, and print the plan.

    Args:
        drafter ([`DominoDraftModel`]): The drafter, which is not changed.
        target (`PreTrainedModel`): Its target.
        args ([`DominoTrainingArguments`]): Arguments with `minutes`, which are changed in place.
        rows: The examples to train on.
        evaluation: The examples to evaluate on, or None.
        since (`float`): When the minutes began, by `time.perf_counter`.

    Returns:
        `StopInTime`: A callback that ends the training if its steps take longer than the timed ones.
    """
    assert args.minutes is not None
    most_rows = args.per_device_train_batch_size
    timed = [_seconds_of_step(drafter, target, args, rows, min(count, most_rows), blocks) for count, blocks in TIMED]
    at_the_end = FOR_SAVING if evaluation is None else FOR_EVALUATION
    end = since + 60 * args.minutes * (1 - at_the_end)
    seconds = end - time.perf_counter()
    if seconds < max(timed):
        remedy = f"A step takes {max(timed):.1f} s here, and loading and timing took the rest: allow more minutes."
        raise invalid_argument("minutes", "enough for a step", args.minutes, remedy)
    plan = plan_for(seconds, timed, most_rows, args.num_anchors)
    args.__dict__.update(plan)
    notice(
        f"the plan for {args.minutes:g} minutes, {seconds:.0f} s of them for steps: {_described(plan)}, with blocks of "
        f"{drafter.config.block_size}."
    )
    return StopInTime(end)


def _described(plan: Mapping[str, int]) -> str:
    """Describe a plan in words."""
    return "{max_steps} steps of {per_device_train_batch_size} examples, each with up to {num_anchors} blocks".format(
        **plan
    )


def resume_plan(args: DominoTrainingArguments, checkpoint: str) -> None:
    """Continue with the plan of the run that wrote a checkpoint: all its steps, however long they take."""
    run = Run.load(checkpoint)
    if run is None or run.arguments["minutes"] is None:
        remedy = f"That run had no minutes: set {', '.join(PLANNED)} as they were."
        raise invalid_argument(f"minutes with {checkpoint}", "left out", args.minutes, remedy)
    plan = {name: run.arguments[name] for name in PLANNED}
    args.__dict__.update(plan)
    notice(f"the run goes on from {checkpoint} with the plan that it began with: {_described(plan)}.")


def _seconds_of_step(
    drafter: DominoDraftModel,
    target: PreTrainedModel,
    args: DominoTrainingArguments,
    rows: Any,
    num_rows: int,
    num_anchors: int,
) -> float:
    """Measure the mean seconds of a step with these numbers of examples and anchors, on a copy of the drafter."""
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        scratch = copy.copy(args)
        scratch.__dict__.update(
            output_dir=folder,
            per_device_train_batch_size=num_rows,
            num_anchors=num_anchors,
            max_steps=TIMED_STEPS + 1,
            disable_tqdm=True,
            enable_jit_checkpoint=False,
            report_to=[],
            push_to_hub=False,
            save_strategy="no",
            eval_strategy="no",
            logging_strategy="no",
        )
        trainer = DominoTrainer(copy.deepcopy(drafter), target, scratch, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return (clock.seconds[-1] - clock.seconds[1]) / TIMED_STEPS


class _Clock(TrainerCallback):
    """Times steps, including what the trainer does between them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Record when the step begins."""
        self.seconds.append(time.perf_counter())

    on_train_end = on_step_begin


class StopInTime(TrainerCallback):
    """Ends a training when its minutes are over, even if steps of its plan are left.

    Args:
        end (`float`): When the time is over, by `time.perf_counter`.
    """

    def __init__(self, end: float):
        self._end = end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the training if the time is over."""
        if time.perf_counter() > self._end and state.global_step < state.max_steps:
            control.should_training_stop = True
            notice(
                f"the {args.minutes:g} minutes are over after {state.global_step} of {state.max_steps} steps, which "
                "took longer than those that were timed. The learning rate has not decayed to its end."
            )
            state.max_steps = state.global_step


def memory_of(drafter: DominoDraftModel, uses_muon: bool) -> int:
    """Count the bytes of a drafter in training: fp32 weights, and for those that are trained gradients and moments.

    AdamW keeps two moments of a weight, and Muon one.
    """
    values = 0
    for name, parameter in drafter.named_parameters():
        num_moments = 1 if uses_muon and trains_with_muon(name, parameter) else 2
        values += parameter.numel() * (1 + parameter.requires_grad * (1 + num_moments))
    return 4 * values


def print_requirements(trainer: DominoTrainer) -> None:
    """Print how much text there is, how many steps will run, and how large the drafter is."""
    args = trainer.args
    rows: Any = trainer.train_dataset
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    steps = args.max_steps if args.max_steps > 0 else round(args.num_train_epochs * len(rows) / per_step)
    counts = getattr(rows, "counts", None)
    tokens = "" if counts is None else f" with {counts.tokens:,} tokens"
    config = trainer.drafter.config
    size = trainer.drafter.num_parameters()
    memory = memory_of(trainer.drafter, uses_muon=args.muon_learning_rate is not None) / 1e9
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

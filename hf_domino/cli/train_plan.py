"""`hf-domino train --plan`: the memory, time and disk of a training, as a table, in place of the training.

Time is that of a few steps, where the training could begin here and now, else a lower bound from operations.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hf_domino._common.dtypes import dtype_of
from hf_domino.cli.flags import positive_int

if TYPE_CHECKING:
    from hf_domino.training.scale.plan import TrainingPlan
    from hf_domino.training.scale.probe import MeasuredSteps

GB, TERA = 1e9, 1e12
STEPS = 5  # that are measured
ELSEWHERE = ("plan_tflops", "plan_memory", "plan_processes")  # what is said of other devices than that at hand


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a plan."""
    add = parser.add_argument_group("a plan in place of the training").add_argument
    add("--plan", action="store_true", help="say what memory, time and disk it takes, and train nothing")
    add("--plan-rows", type=positive_int, help="training rows (default: the lines of train_file, where it is .jsonl)")
    add("--plan-processes", type=positive_int, help="processes, one per device (default: those that run)")
    add("--plan-tflops", type=float, help="10^12 operations per second of a device (default: measured on this one)")
    add("--plan-memory", type=float, help="memory of a device in GB (default: of this one)")
    add("--plan-steps", type=int, default=STEPS, help=f"most steps to measure here, 0 for none (default: {STEPS})")
    add("--json", action="store_true", help="print the plan as JSON, in bytes and seconds")


def run_plan(options: argparse.Namespace, names: Any, shape: Any, data: Any, args: Any) -> None:
    """Print the plan of a training.

    Args:
        options (`argparse.Namespace`): With the flags of [`add_flags`].
        names, shape, data, args: The four groups of fields of the training.

    Raises:
        ValueError: If a flag or field is out of range.
    """
    from transformers import AutoConfig

    from hf_domino._common.notices import silent
    from hf_domino.configuration import DominoConfig
    from hf_domino.training.scale.plan import measure_flops, plan_training

    for flag in ("plan_tflops", "plan_memory"):
        if (value := getattr(options, flag)) is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{flag.replace('_', '-')} must be above 0 and finite, got {value}.")
    if options.plan_steps < 0:
        raise ValueError(f"--plan-steps must be at least 0, got {options.plan_steps}.")
    target_config = AutoConfig.from_pretrained(names.target)
    if names.drafter is None:
        with silent():  # its mask token, sought without a tokenizer, is not read
            config = DominoConfig.for_target(target_config, **shape.overrides())
    else:
        config = DominoConfig.from_pretrained(names.drafter)
    flops = options.plan_tflops * TERA if options.plan_tflops else measure_flops(args.device, args.computes_in)
    plan = plan_training(
        target_config,
        config,
        args,
        target_dtype=None if names.target_dtype == "auto" else dtype_of(names.target_dtype),
        num_rows=options.plan_rows or _count_lines(data.train_file),
        num_processes=options.plan_processes or args.world_size,
        flops_per_second=flops,
    )
    memory = options.plan_memory * GB if options.plan_memory else _device_memory(args.device)
    steps = _why_unmeasured(options, names, data, args, plan.peak_bytes <= memory) or _measure(
        names, shape, data, args, options.plan_steps
    )
    if options.json:
        print(json.dumps(_record(plan, memory, steps)))
        return
    source = "given" if options.plan_tflops else f"measured on {args.device.type}"
    rate = f"{flops / TERA:.4g} x 10^12 a second ({source})" if isinstance(steps, str) else ""
    print(_table(plan, memory, rate))
    print(*_lines_of_steps(plan, steps, args.device.type), sep="\n")


def _why_unmeasured(options: argparse.Namespace, names: Any, data: Any, args: Any, fits: bool) -> str | None:
    """What keeps steps from being measured here, if anything does."""
    from hf_domino.training.scale.placing import files_digest

    if options.plan_steps == 0:
        return "--plan-steps is 0"
    if given := [flag for flag in ELSEWHERE if getattr(options, flag) is not None]:
        return f"--{given[0].replace('_', '-')} tells of another device than this one"
    if args.world_size > 1:
        return "a plan is made by one process"
    if data.train_file is None and data.train_dataset is None:
        return "there is no training text"
    if data.on_policy:
        return "the target has yet to write the training text (on_policy)"
    if not fits:
        return "a step does not fit into the memory"
    return None if files_digest(names.target) else "the target's weights are not on this machine"


def _measure(names: Any, shape: Any, data: Any, args: Any, num_steps: int) -> MeasuredSteps | str:
    """Steps as they were measured; or why they were not, as a plan refuses nothing that only a training needs."""
    from hf_domino.training.scale.probe import measure_steps

    try:
        return measure_steps(names, shape, data, args, num_steps)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        return f"the training does not begin: {error}"


def _record(plan: TrainingPlan, memory: float, steps: MeasuredSteps | str) -> dict[str, Any]:
    """A plan as JSON."""
    measured = {"unmeasured": steps} if isinstance(steps, str) else {"measured": asdict(steps)}
    return asdict(plan) | {"device_bytes": memory} | measured


def _count_lines(path: str | None) -> int | None:
    if path is None or not path.endswith(".jsonl"):
        return None
    with open(path, "rb") as lines:
        return sum(1 for line in lines if line.strip())


def _device_memory(device: Any) -> float:
    import torch

    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _table(plan: TrainingPlan, memory: float, rate: str) -> str:
    """Lines of parts, with what follows from them; without a bound of the time where steps were measured."""
    lines = ["memory of each process, GB, at the fullest moment of a step"]
    lines += [f"  {part:32}{size / GB:10.2f}" for part, size in plan.memory.items()]
    fits = "fits" if plan.peak_bytes <= memory else "does not fit"
    lines += [f"  {'together':32}{plan.peak_bytes / GB:10.2f}  {fits} into {memory / GB:.0f} GB"]
    lines += ["operations of each process in one optimizer step, 10^12"]
    lines += [f"  {part:32}{flops / TERA:10.2f}" for part, flops in plan.flops_per_step.items()]
    if rate:
        lines += [f"time at {rate}, of full rows: at least"]
        lines += [f"  {'seconds per step':32}{plan.seconds_per_step:10.2f}"]
        if plan.hours is not None:
            lines += [f"  {f'hours for {plan.steps:,} steps':32}{plan.hours:10.2f}"]
    lines += ["disk, GB", f"  {'a checkpoint':32}{plan.checkpoint_bytes / GB:10.2f}"]
    if plan.hidden_states_bytes is not None:
        lines += [f"  {'hidden states, where cached':32}{plan.hidden_states_bytes / GB:10.2f}"]
    else:
        lines += [f"  {'hidden states, per 10^6 tokens':32}{plan.hidden_states_bytes_per_token * 1e6 / GB:10.2f}"]
    return "\n".join([*lines, "Rows are taken to be full: max_length tokens, num_anchors blocks."])


def _lines_of_steps(plan: TrainingPlan, steps: MeasuredSteps | str, device: str) -> list[str]:
    """What was measured, with what follows for the whole training."""
    if isinstance(steps, str):
        return [f"Steps are not measured: {steps}."]
    lines = [f"measured on {device}, over {steps.num_steps} steps of {steps.rows_per_step} of its rows"]
    lines += [_line("steps per second", 1 / steps.seconds_per_step)]
    lines += [_line("anchors per second", steps.anchors_per_step / steps.seconds_per_step)]
    if plan.steps is not None:
        lines += [_line(f"hours for {plan.steps:,} steps", plan.steps * steps.seconds_per_step / 3600)]
        lines += [f"  {'anchors in them':32}{round(plan.steps * steps.anchors_per_step):10,}"]
    return lines


def _line(name: str, value: float) -> str:
    return f"  {name:32}{value:10.4g}"

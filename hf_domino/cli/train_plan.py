"""`hf-domino train --plan`: the memory, time and disk of a training, as a table, in place of the training."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hf_domino.cli.flags import positive_int

if TYPE_CHECKING:
    from hf_domino.training.scale.plan import TrainingPlan

GB, TERA = 1e9, 1e12


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a plan."""
    add = parser.add_argument_group("a plan in place of the training").add_argument
    add("--plan", action="store_true", help="estimate memory, time and disk from configurations, and train nothing")
    add("--plan-rows", type=positive_int, help="training rows (default: the lines of train_file, where it is .jsonl)")
    add("--plan-processes", type=positive_int, help="processes, one per device (default: those that run)")
    add("--plan-tflops", type=float, help="10^12 operations per second of a device (default: measured on this one)")
    add("--plan-memory", type=float, help="memory of a device in GB (default: of this one)")
    add("--json", action="store_true", help="print the plan as JSON, in bytes and seconds")


def run_plan(options: argparse.Namespace, names: Any, shape: Any, data: Any, args: Any) -> None:
    """Print the plan of a training.

    Args:
        options (`argparse.Namespace`): With the flags of [`add_flags`].
        names, shape, data, args: The four groups of fields of the training.

    Raises:
        ValueError: If a flag or field is out of range.
    """
    import torch
    from transformers import AutoConfig

    from hf_domino.configuration import DominoConfig
    from hf_domino.training.scale.plan import measure_flops, plan_training

    for flag in ("plan_tflops", "plan_memory"):
        if (value := getattr(options, flag)) is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{flag.replace('_', '-')} must be above 0 and finite, got {value}.")
    target_config = AutoConfig.from_pretrained(names.target)
    if names.drafter is None:
        config = DominoConfig.for_target(target_config, **shape.overrides())
    else:
        config = DominoConfig.from_pretrained(names.drafter)
    flops = options.plan_tflops * TERA if options.plan_tflops else measure_flops(args.device, args.computes_in)
    plan = plan_training(
        target_config,
        config,
        args,
        target_dtype=None if names.target_dtype == "auto" else getattr(torch, names.target_dtype),
        num_rows=options.plan_rows or _count_lines(data.train_file),
        num_processes=options.plan_processes or args.world_size,
        flops_per_second=flops,
    )
    memory = options.plan_memory * GB if options.plan_memory else _device_memory(args.device)
    if options.json:
        print(json.dumps(asdict(plan) | {"device_bytes": memory}))
    else:
        print(_table(plan, memory, "given" if options.plan_tflops else f"measured on {args.device.type}"))


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
    """Lines of parts, with what follows from them."""
    lines = ["memory of each process, GB, at the fullest moment of a step"]
    lines += [f"  {part:32}{size / GB:10.2f}" for part, size in plan.memory.items()]
    fits = "fits" if plan.peak_bytes <= memory else "does not fit"
    lines += [f"  {'together':32}{plan.peak_bytes / GB:10.2f}  {fits} into {memory / GB:.0f} GB"]
    lines += ["operations of each process in one optimizer step, 10^12"]
    lines += [f"  {part:32}{flops / TERA:10.2f}" for part, flops in plan.flops_per_step.items()]
    if plan.seconds_per_step is not None and plan.flops_per_second is not None:
        lines += [f"time at {plan.flops_per_second / TERA:.4g} x 10^12 a second ({rate}): at least"]
        lines += [f"  {'seconds per step':32}{plan.seconds_per_step:10.2f}"]
    if plan.hours is not None:
        lines += [f"  {f'hours for {plan.steps:,} steps':32}{plan.hours:10.2f}"]
    lines += ["disk, GB", f"  {'a checkpoint':32}{plan.checkpoint_bytes / GB:10.2f}"]
    if plan.hidden_states_bytes is not None:
        lines += [f"  {'hidden states, where cached':32}{plan.hidden_states_bytes / GB:10.2f}"]
    else:
        lines += [f"  {'hidden states, per 10^6 tokens':32}{plan.hidden_states_bytes_per_token * 1e6 / GB:10.2f}"]
    return "\n".join([*lines, "Rows are taken to be full: max_length tokens, num_anchors blocks."])

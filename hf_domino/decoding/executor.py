"""Executors, which call the functions of a round.

A round consists of a few functions of tensors: the drafter's backbone, its correction, the target's forward, and
acceptance. If shapes grow, `Executor` simply calls them. If shapes are fixed, `Workspace` (static/workspace.py)
captures each function once per shape and replays it. The functions are the same in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import DraftContext
from hf_domino.stats.phases import PhaseTimer


class Executor:
    """An executor that simply calls the functions.

    Args:
        timer ([`PhaseTimer`], *optional*): Measures the phases of the call. Defaults to a timer that is switched off.
    """

    is_fixed = False  # whether shapes are fixed
    is_compiled = False  # whether functions are compiled
    num_prepared = 0  # how many functions have been captured or compiled, in rounds that took much longer than others
    context: DraftContext | None = None  # the drafter's context, if shapes are fixed

    def __init__(self, timer: PhaseTimer | None = None):
        self.timer = timer or PhaseTimer(enabled=False)

    def run(self, function: Callable[..., Any], *inputs: Any, key: Hashable = ()) -> Any:
        """Call a function.

        Args:
            function (`Callable`): The function, which takes `inputs` as positional arguments.
            inputs: Tensors, prefixes, a distribution, and numbers.
            key (`Hashable`, *optional*): Whatever else a captured function depends on. It is not used here.

        Returns:
            The result of the function.
        """
        return function(*inputs)

    def hold(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return values that are fixed for a call. A workspace copies them to where captured functions find them."""
        return values

    def hold_on_device(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return values like [`~Executor.hold`], from the target's device."""
        return values

    def hold_for_each(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return one number for each sequence, `[..., B, 1]`, like [`~Executor.hold`]."""
        return values

    def select(self, values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Keep only these sequences, given in ascending order, in what [`~Executor.hold_for_each`] returned."""
        return values[..., list(rows), :]

    def release(self, target: PreTrainedModel, drafter: DominoDraftModel) -> None:
        """End the call. A workspace becomes available to the next call of these models; here, nothing needs doing."""

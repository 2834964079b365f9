"""Executors: what calls the functions of a round.

A round is a few functions of tensors: the drafter's backbone, its correction, the target's forward, acceptance. Where
shapes grow, `Executor` just calls them. Where they are fixed, `Workspace` (static/workspace.py) captures each once for
every shape and replays it. The functions are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from transformers import PreTrainedModel

from hf_domino.methods import DominoDraftModel
from hf_domino.statistics.phases import PhaseTimer


class Executor:
    """Calls functions as they are.

    Args:
        timer ([`PhaseTimer`], *optional*): The clock of the call; defaults to one that does not run.
    """

    is_fixed = False  # whether shapes are fixed

    def __init__(self, timer: PhaseTimer | None = None):
        self.timer = timer or PhaseTimer(enabled=False)

    def run(self, function: Callable[..., Any], *inputs: Any, key: Hashable = ()) -> Any:
        """Call a function.

        Args:
            function (`Callable`): Of the inputs.
            inputs: Tensors, prefixes, a distribution, numbers.
            key (`Hashable`, *optional*): What the function depends on beside its inputs, where it is captured.

        Returns:
            What the function returns.
        """
        return function(*inputs)

    def release(self, target: PreTrainedModel, drafter: DominoDraftModel) -> None:
        """End the call, with nothing to leave to the next one of these models."""

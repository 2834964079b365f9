"""Which laws can be part of stages, and the text that they look at there.

A stage reads nothing back and has one shape, so a text of any length is one tensor: how many tokens there are, then as
many ids as there is room for.

Shapes: S capacity.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch

from hf_domino.decoding.prefixes import Prefixes, UnreadPrefixes
from hf_domino.decoding.processors.effects import Effect
from hf_domino.decoding.processors.stock import CHECKS_LAW, PREFIX_FREE
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.workspace import Workspace


class FixedLaw:
    """A law as part of stages.

    Args:
        law ([`TokenLaw`]): The target's or the drafts'; what they share is held in one place.
        workspace ([`Workspace`]): Whose stages.
    """

    def __init__(self, law: TokenLaw, workspace: Workspace):
        self.law, self.key, self._capacity = law, law_key(law), workspace.capacity
        for index, effect in enumerate(law.effects):
            effect.hold(partial(_hold, workspace, f"law {index} {type(effect.processor).__name__}"))

    def text(self, prefixes: Prefixes) -> torch.Tensor:
        """Tokens of one row that the law reads: the last `[1, 1]`, or how many there are and all, `[1, 1 + S]`."""
        if not self.law.needs_prefix:
            return prefixes.last()
        length = prefixes.longest
        text = torch.nn.functional.pad(prefixes.ids[:, :length], (1, self._capacity - length))
        text[:, 0].fill_(length)
        return text

    def prefixes(self, text: torch.Tensor) -> Prefixes:
        """The prefixes of a text, inside a stage."""
        return UnreadPrefixes(text[:, 1:], text[:, :1], [0]) if self.law.needs_prefix else Prefixes.of(text)


def _hold(workspace: Workspace, effect: str, name: str, values: torch.Tensor) -> torch.Tensor:
    return workspace.hold(f"{effect} {name}", values.to(workspace.device))


def law_key(law: TokenLaw) -> Hashable | None:
    """Key of the stages that a law is part of; None where it reads a result back, or asks a caller's function."""
    parts: list[Hashable] = []
    for step in law.steps:
        if isinstance(step, Effect):
            parts.append(step.key)
        elif type(step) in PREFIX_FREE and type(step) not in CHECKS_LAW:  # which reads a result back
            parts.append((type(step), *sorted(vars(step).items())))
        else:
            parts.append(None)
    return None if None in parts else tuple(parts)

"""Laws in stages: which can be part of one, the text they look at there, and how functions of a law are run.

A stage reads nothing back and has one shape, so a text of any length is one tensor: how many tokens there are, then as
many ids as there is room for. A law that reads values back, or asks a caller, is no part of a stage: what uses it runs
between them.

Shapes: S capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

import torch
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors import CHECKS_LAW, PREFIX_FREE, Effect
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.workspace import Workspace
from hf_domino.decoding.tree import Tree

Found = TypeVar("Found")

register_pytree_node(
    Tree, lambda tree: ([tree.tokens, tree.parents, tree.longest], None), lambda fields, _: Tree(*fields)
)


class FixedLaw:
    """A law as part of a workspace's stages; what the target's and the drafts' law share is held in one place."""

    def __init__(self, law: TokenLaw, workspace: Workspace):
        self.law, self.key, self._workspace = law, law_key(law), workspace
        for index, effect in enumerate(law.effects):
            effect.hold(partial(_hold, workspace, f"law {index} {type(effect.processor).__name__}"))

    def run(self, name: str, function: Callable[..., Found], prefixes: Prefixes, *inputs: object) -> Found:
        """Call a function of the law, one row's prefixes and inputs: as a stage, where the law can be part of one."""
        # Tensors are copied to where a graph reads them, and it is captured for all other inputs. What it returns is
        # written over by its next run.
        if self.key is None:
            return function(self.law, prefixes, *inputs)
        leaves, form = tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def stage(text: torch.Tensor, *tensors: torch.Tensor) -> Found:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return function(self.law, self.prefixes(text), *tree_unflatten(filled, form))

        fixed = [torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return self._workspace.graphs((name, self.key, *fixed), stage, self.text(prefixes), *tensors)

    def text(self, prefixes: Prefixes) -> torch.Tensor:
        """Tokens of one row that the law reads: the last `[1, 1]`, or how many there are and all, `[1, 1 + S]`."""
        if not self.law.needs_prefix:
            return prefixes.last()
        length = prefixes.longest
        text = torch.nn.functional.pad(prefixes.ids[:, :length], (1, self._workspace.capacity - length))
        text[:, 0].fill_(length)
        return text

    def prefixes(self, text: torch.Tensor) -> Prefixes:
        """The prefixes of a text, inside a stage."""
        return Prefixes(text[:, 1:], text[:, :1], [0]) if self.law.needs_prefix else Prefixes.of(text)


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

"""Laws in stages: which can be part of one, the text they look at there, and how functions of a distribution are run.

A stage reads nothing back and has one shape, so a text of any length is one tensor: how many tokens there are, then as
many ids as there is room for. A distribution that reads values back, or asks a caller, is no part of a stage: what uses
it runs between them.

Shapes: S capacity.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten
from transformers import LogitsProcessorList

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors import CHECKS_DISTRIBUTION, PREFIX_FREE, Effect
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.static.workspace import Workspace
from hf_domino.decoding.stopping import KnownStops
from hf_domino.decoding.tree import Tree
from hf_domino.decoding.verification import Verification

register_pytree_node(
    Tree, lambda tree: ([tree.tokens, tree.parents, tree.longest], None), lambda fields, _: Tree(*fields)
)
register_pytree_node(
    Verification,
    lambda found: ([found.scores, found.decided, found.path], None),
    lambda fields, _: Verification(*fields),
)


class FixedDistribution(TokenDistribution):
    """A distribution as part of a workspace's stages.

    Args:
        processors (`LogitsProcessorList`): As in [`TokenDistribution`].
        stops ([`KnownStops`]): Likewise.
        workspace ([`Workspace`]): Holds what its stages read.
    """

    def __init__(self, processors: LogitsProcessorList, stops: KnownStops, workspace: Workspace):
        super().__init__(processors, stops)
        self._workspace = workspace
        for index, effect in enumerate(self.effects):
            effect.hold(partial(_hold, workspace, f"distribution {index} {type(effect.processor).__name__}"))

    @property
    def key(self) -> Hashable | None:
        """Key of the stages that it is part of; None where it reads a result back, or asks a caller's function."""
        parts: list[Hashable] = []
        for step in self.steps:
            if isinstance(step, Effect):
                parts.append(step.key)
            elif type(step) in PREFIX_FREE and type(step) not in CHECKS_DISTRIBUTION:  # which reads a result back
                parts.append((type(step), *sorted(vars(step).items())))
            else:
                parts.append(None)
        return None if None in parts else tuple(parts)

    def run(self, name: str, function: Callable[..., Any], prefixes: Prefixes, *inputs: Any) -> Any:
        """Call a function of the distribution as a stage, or directly where the distribution has no key."""
        if (key := self.key) is None:
            return function(self, prefixes, *inputs)
        # Tensors are copied to where a graph reads them, and it is captured for all other inputs. What it returns is
        # written over by its next run.
        leaves, form = tree_flatten(inputs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def stage(text: torch.Tensor, *tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            return function(self, self.prefixes(text), *tree_unflatten(filled, form))

        fixed = [torch.Tensor if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        found = self._workspace.run((name, key, *fixed), stage, self.text(prefixes), *tensors)
        return replace(found) if isinstance(found, Tree) else found  # a tree keeps what it has worked out

    def text(self, prefixes: Prefixes) -> torch.Tensor:
        """Tokens of each row that are read: the last `[B, 1]`, or how many there are and all of them, `[B, 1 + S]`."""
        if not self.needs_prefix:
            return prefixes.last()
        length = prefixes.longest
        text = torch.nn.functional.pad(prefixes.ids[:, :length], (1, self._workspace.capacity - length))
        text[:, :1] = prefixes.ends
        return text

    def prefixes(self, text: torch.Tensor) -> Prefixes:
        """The prefixes of a text, inside a stage."""
        if not self.needs_prefix:
            return Prefixes.of(text)
        return Prefixes(text[:, 1:], text[:, :1], list(range(len(text))))


def _hold(workspace: Workspace, effect: str, name: str, values: torch.Tensor) -> torch.Tensor:
    return workspace.hold(f"{effect} {name}", values.to(workspace.device))

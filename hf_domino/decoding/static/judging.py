"""Acceptance as a stage of fixed shape, and which laws can be part of one."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors.stock import CHECKS_LAW, PREFIX_FREE
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.workspace import Workspace
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.verification import Judgement, judge


def law_key(law: TokenLaw) -> Hashable | None:
    """What a law is made of, if it can be part of a stage; None if it looks at a prefix or at a result."""
    parts: list[Hashable] = []
    for processor in law.processors:
        if type(processor) not in PREFIX_FREE or type(processor) in CHECKS_LAW:  # which reads a result back
            return None
        parts.append((type(processor), *sorted(vars(processor).items())))
    return tuple(parts)


class StaticJudge:
    """Accepts proposals as a stage, where the law can be part of one.

    Args:
        law ([`TokenLaw`]): The target's.
        workspace ([`Workspace`]): Its graphs.
    """

    def __init__(self, law: TokenLaw, workspace: Workspace):
        self.law, self._graphs = law, workspace.graphs
        self._key = law_key(law)

    def __call__(
        self,
        law: TokenLaw,
        prefixes: Prefixes,
        proposals: Tree,
        logits: torch.Tensor,
        noise: torch.Tensor | None,
    ) -> Judgement:
        """See [`~hf_domino.decoding.verification.judge`]."""
        if self._key is None:
            return judge(law, prefixes, proposals, logits, noise)
        inputs = [tensor for tensor in (logits, proposals.tokens, proposals.parents, noise) if tensor is not None]
        is_chain, longest = proposals.parents is None, proposals.longest
        stage = partial(self._judge, is_chain, longest)
        return Judgement(*self._graphs(("judge", self._key, is_chain, longest), stage, *inputs))

    def _judge(
        self, is_chain: bool, longest: int | None, logits: torch.Tensor, tokens: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        given = list(others)
        parents = None if is_chain else given.pop(0)
        noise = given.pop(0) if given else None
        found = judge(self.law, Prefixes.of(tokens), Tree(tokens, parents, longest), logits, noise)
        return (found.scores, found.outcome) if found.path is None else (found.scores, found.outcome, found.path)

"""Acceptance as a stage of fixed shape."""

from __future__ import annotations

from functools import partial

import torch

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.laws import FixedLaw
from hf_domino.decoding.static.workspace import Workspace
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.verification import Judgement, judge


class StaticJudge:
    """Accepts proposals as a stage, where the law can be part of one.

    Args:
        law ([`TokenLaw`]): The target's.
        workspace ([`Workspace`]): Its graphs.
    """

    def __init__(self, law: TokenLaw, workspace: Workspace):
        self._law, self._graphs = FixedLaw(law, workspace), workspace.graphs

    def __call__(
        self,
        law: TokenLaw,
        prefixes: Prefixes,
        proposals: Tree,
        logits: torch.Tensor,
        noise: torch.Tensor | None,
    ) -> Judgement:
        """See [`~hf_domino.decoding.verification.judge`]."""
        if self._law.key is None:
            return judge(law, prefixes, proposals, logits, noise)
        tensors = (logits, self._law.text(prefixes), proposals.tokens, proposals.parents, noise)
        is_chain, longest = proposals.parents is None, proposals.longest
        stage = partial(self._judge, is_chain, longest)
        inputs = [tensor for tensor in tensors if tensor is not None]
        return Judgement(*self._graphs(("judge", self._law.key, is_chain, longest), stage, *inputs))

    def _judge(
        self,
        is_chain: bool,
        longest: int | None,
        logits: torch.Tensor,
        text: torch.Tensor,
        tokens: torch.Tensor,
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        given = list(others)
        parents = None if is_chain else given.pop(0)
        noise = given.pop(0) if given else None
        found = judge(self._law.law, self._law.prefixes(text), Tree(tokens, parents, longest), logits, noise)
        return (found.scores, found.outcome) if found.path is None else (found.scores, found.outcome, found.path)

"""What the tests of kinds share."""

from __future__ import annotations

import copy

import pytest
from calls_of_methods import tree_of

from hf_domino.decoding import drafting
from hf_domino.decoding.branches import SHARPNESS


@pytest.fixture(scope="module")
def wide(tiny_llama):
    """An fp64 target with an lm_head of its own."""
    target = copy.deepcopy(tiny_llama).double()
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture
def rounds(monkeypatch):
    """What was drafted: the call's row, the text so far without padding, and the proposals or the tree."""
    seen, propose = [], drafting.DraftSession.propose

    def record(self, prefixes, *args, **kwargs):
        tree = propose(self, prefixes, *args, **kwargs)
        for index, (row, length) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            text = prefixes.ids[index, :length].tolist()
            text = text[next(place for place, token in enumerate(text) if token != 2) :]
            drafted = tree.tokens[index].tolist() if tree.chances is None else tree_of(tree, index)
            seen.append((row, text, drafted, SHARPNESS))
        return tree

    monkeypatch.setattr(drafting.DraftSession, "propose", record)
    return seen

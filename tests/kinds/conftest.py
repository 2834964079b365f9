"""What the tests of kinds share."""

from __future__ import annotations

import copy

import pytest
import torch
from calls_of_kinds import tree_of

from hf_domino.decoding import drafting
from hf_domino.decoding.lanes import SHARPNESS


@pytest.fixture(scope="module")
def wide(tiny_llama):
    """An fp64 target with an lm_head of its own."""
    target = copy.deepcopy(tiny_llama).double()
    target.generation_config.eos_token_id = None
    return target


@pytest.fixture
def rounds(monkeypatch):
    """What was drafted: the call's row, the text so far without padding, and the proposals or the tree."""
    seen = []

    def recording(method):
        def record(self, prefixes, *args, **kwargs):
            found = method(self, prefixes, *args, **kwargs)
            for index, (row, length) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
                text = prefixes.ids[index, :length].tolist()
                text = text[next(place for place, token in enumerate(text) if token != 2) :]
                drafted = found[index].tolist() if isinstance(found, torch.Tensor) else tree_of(found, index)
                seen.append((row, text, drafted, SHARPNESS))
            return found

        return record

    for name in ("propose", "grow"):
        monkeypatch.setattr(drafting.DraftSession, name, recording(getattr(drafting.DraftSession, name)))
    return seen

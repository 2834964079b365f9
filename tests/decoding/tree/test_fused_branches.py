"""Branches by kernels grow the trees that PyTorch grows, where a chain's proposals are chosen by kernels too."""

from __future__ import annotations

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter
from drafts import branches_of
from transformers import LogitsProcessorList, TemperatureLogitsWarper

import domino_kernels
from hf_domino.decoding import growing
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.methods import correction
from hf_domino.targets.view import TargetModel

DEPTH, NUM_NODES = 4, 20
DRAFTED = list(range(1, VOCAB_SIZE, 3))
WARPED = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
CHANCE_TOLERANCE = 1e-5  # fp32: scores of some tens, summed in another order

pytest.importorskip("triton")


@pytest.fixture
def launched(monkeypatch):
    """Names of the operations that branches take, in order."""
    names = []
    for name in ("advance_branches", "correct_branches"):
        operation = getattr(correction, name)
        noting = lambda *inputs, name=name, operation=operation: names.append(name) or operation(*inputs)  # noqa: E731
        monkeypatch.setattr(correction, name, noting)
    return names


@torch.no_grad()
def grow(tiny, processors=(), is_drawn=False, is_fixed=True, drafted=None, **options):
    """Trees of two rows behind random draft hidden states, of a drafter with strong corrections."""
    drafter = build_drafter(tiny, **options)
    generator = torch.Generator().manual_seed(5)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0, generator=generator)
    drafter = drafter if drafted is None else drafter.restricted(drafted)
    hidden = torch.randn(2, DEPTH, drafter.config.hidden_size, generator=generator)
    prefixes = Prefixes(torch.randint(4, VOCAB_SIZE, (2, 11), generator=generator), [11, 8], [0, 1])
    noise = torch.empty(2, DEPTH, VOCAB_SIZE).exponential_(generator=generator) if is_drawn else None
    distribution, target = TokenDistribution(LogitsProcessorList(processors)), TargetModel(tiny)
    ends = torch.empty(0, dtype=torch.long) if is_fixed else None
    behind = branches_of(drafter, target, hidden, prefixes, distribution, noise, is_tree=True)
    return growing.grow(behind, NUM_NODES, ends=ends)


@pytest.mark.parametrize(
    ("distribution", "options", "is_fixed"),
    [
        ({}, {"pure_draft_prefix_len": 2}, True),
        ({"processors": WARPED, "is_drawn": True}, {}, False),
        ({"drafted": DRAFTED}, {}, False),
        ({"is_drawn": True}, {"draft_pool_size": 5, "shift_label": True}, True),
    ],
    ids=["prefix", "drawn", "draft vocabulary", "small pool"],
)
def test_trees_are_equal(tiny_qwen3, launched, distribution, options, is_fixed):
    expected = grow(tiny_qwen3, **distribution, **options, is_fixed=is_fixed)
    assert not launched
    with domino_kernels.use_backend("triton"):
        grown = grow(tiny_qwen3, **distribution, **options, is_fixed=is_fixed)
    assert grown.longest == DEPTH or not is_fixed
    corrected = grown.longest - options.get("pure_draft_prefix_len", 0)
    assert (launched.count("advance_branches"), launched.count("correct_branches")) == (grown.longest - 1, corrected)
    assert torch.equal(grown.tokens, expected.tokens)
    assert torch.equal(grown.parents, expected.parents)
    torch.testing.assert_close(grown.chances, expected.chances, atol=CHANCE_TOLERANCE, rtol=0)

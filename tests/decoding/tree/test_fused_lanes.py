"""Lanes by kernels grow the trees that PyTorch grows, where a chain's proposals are chosen by kernels too."""

from __future__ import annotations

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import domino_kernels
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree import lanes
from hf_domino.decoding.tree.chances import Chances
from hf_domino.decoding.tree.growing import grow_tree
from hf_domino.target.view import TargetModel

DEPTH, NUM_NODES = 4, 20
DRAFTED = list(range(1, VOCAB_SIZE, 3))
WARPED = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
PENALISED = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)])
CHANCE_TOLERANCE = 1e-5  # fp32: scores of some tens, summed in another order

pytest.importorskip("triton")


@pytest.fixture
def launched(monkeypatch):
    """Names of the operations that lanes take, in order."""
    names = []
    for name in ("advance_lanes", "correct_lanes"):
        operation = getattr(lanes, name)
        noting = lambda *inputs, name=name, operation=operation: names.append(name) or operation(*inputs)  # noqa: E731
        monkeypatch.setattr(lanes, name, noting)
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
    law, target = TokenLaw(LogitsProcessorList(processors)), TargetModel(tiny, drafter.config)
    options = {"num_nodes": NUM_NODES, "chances": Chances(), "is_fixed": is_fixed}
    return grow_tree(drafter, target, hidden, prefixes, law, noise, **options)


@pytest.mark.parametrize("is_fixed", [True, False], ids=["fixed", "read"])
@pytest.mark.parametrize(
    ("law", "options"),
    [
        ({}, {}),
        ({"processors": WARPED, "is_drawn": True}, {}),
        ({}, {"pure_draft_prefix_len": 2}),
        ({"drafted": DRAFTED}, {}),
        ({"is_drawn": True}, {"draft_pool_size": 5, "shift_label": True}),
    ],
    ids=["greedy", "drawn", "prefix", "draft vocabulary", "small pool"],
)
def test_trees_are_equal(tiny_qwen3, launched, law, options, is_fixed):
    expected = grow(tiny_qwen3, **law, **options, is_fixed=is_fixed)
    assert not launched
    with domino_kernels.use_backend("triton"):
        grown = grow(tiny_qwen3, **law, **options, is_fixed=is_fixed)
    assert len(grown.races) == DEPTH or not is_fixed
    corrected = len(grown.races) - options.get("pure_draft_prefix_len", 0)
    assert (launched.count("advance_lanes"), launched.count("correct_lanes")) == (len(grown.lanes), corrected)
    assert torch.equal(grown.tree.tokens, expected.tree.tokens)
    assert torch.equal(grown.tree.parents, expected.tree.parents)
    torch.testing.assert_close(grown.chances, expected.chances, atol=CHANCE_TOLERANCE, rtol=0)


def test_other_laws_grow_in_pytorch(tiny_qwen3, launched):
    with domino_kernels.use_backend("triton"):
        grow(tiny_qwen3, PENALISED)
    assert not launched


@torch.no_grad()
def test_output_is_that_of_the_target_alone(tiny_qwen3, launched):
    prompt, arguments = torch.randint(4, VOCAB_SIZE, (1, 9)), {"max_new_tokens": 6, "do_sample": False}
    drafter = build_drafter(tiny_qwen3, draft_tree_size=NUM_NODES)
    with domino_kernels.use_backend("triton"):
        output = tiny_qwen3.generate(prompt, assistant_model=drafter, **arguments)
    assert launched
    assert torch.equal(output, tiny_qwen3.generate(prompt, **arguments))

"""Chains or trees: rounds find out which bring more tokens in the same time, and the text stays the target's."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from builders import build_drafter
from oracle import tree_faults

from hf_domino.decoding.pacing import ways
from hf_domino.decoding.pacing.blocks import Block, SingleStep
from hf_domino.decoding.pacing.pacer import Pace, Pacer, pacer_for
from hf_domino.decoding.pacing.ways import AGAIN, EACH, FIRST_ROUNDS, TURNS, Contest
from hf_domino.decoding.tree.block import ADAPTIVE_SIZE, Trees

WHOLE = FIRST_ROUNDS + TURNS
"""Rounds until both ways have had their turns."""


def rounds(contest, cost, gain, count, seed=0):
    """Rounds of trees that cost and bring so many times as much as chains, on a machine that drifts and hiccups."""
    draws, kinds = random.Random(seed), []
    for index in range(count):
        kinds.append(contest.wants_trees())
        speed = math.exp(math.sin(index / 40) + draws.gauss(0, 0.1)) * (3 if draws.random() < 0.05 else 1)
        promised = gain * draws.uniform(0.9, 1.1) if kinds[-1] else None
        contest.observe(kinds[-1], speed * (cost if kinds[-1] else 1.0), promised)
    return kinds


@pytest.mark.parametrize(("cost", "gain"), [(1.1, 1.25), (1.25, 1.1), (1.0, 1.2), (1.3, 1.0)])
def test_what_pays_is_found_whatever_the_clock_does(cost, gain):
    for seed in range(20):
        kinds = rounds(Contest(), cost, gain, 600, seed)
        assert not any(kinds[:FIRST_ROUNDS])
        assert sum(kinds[FIRST_ROUNDS:WHOLE]) == TURNS // 2
        share = sum(kinds[WHOLE:]) / len(kinds[WHOLE:])
        assert share == pytest.approx(float(gain > cost), abs=2 * EACH / AGAIN)


class FakeTree(Block):
    """Sixteen nodes."""

    tree_size, length, gain = 16, 16, 1.4


@pytest.mark.parametrize("seconds_of_tree", [1.7, 2.6])
def test_each_way_has_costs_of_its_own(seconds_of_tree, monkeypatch):
    monkeypatch.setattr(Trees, "block", lambda self, price=None: FakeTree())
    pacer, seen = Pacer(8, is_timed=True, trees=Trees("adaptive")), []
    for _ in range(600):
        block = pacer.begin_round(1, lambda: True)
        length = block.length or block.choose_length(8)
        seconds = seconds_of_tree if block.tree_size else (1.6 if length else 1.0)
        pacer.observe(block, [4 if length else 1], seconds)
        seen.append(block.tree_size)
    assert (seen[-2] is not None) == (seconds_of_tree < 1.6 * 1.4)
    assert pacer.cost(1) == pytest.approx(seconds_of_tree if seen[-2] else 1.6, rel=0.05)


def test_trees_are_chosen_where_nothing_else_was_asked_for(tiny_qwen3, make_drafter):
    def sizes(is_static=False, may_branch=True, **fields):
        pacer = pacer_for(make_drafter(tiny_qwen3, **fields), tiny_qwen3, 5, False, False, is_static)
        blocks = []
        for _ in range(2 * WHOLE):
            blocks.append(pacer.begin_round(1, lambda: may_branch))
            pacer.observe(blocks[-1], [3 if blocks[-1].choose_length(5) else 1], 1.0)
        return {block.tree_size for block in blocks if not isinstance(block, SingleStep)}

    assert sizes(draft_length="adaptive") == {None, ADAPTIVE_SIZE}
    assert sizes(draft_length="adaptive", draft_tree_size=9) == sizes(draft_length="full", draft_tree_size=9) == {9}
    for fields in (
        {"draft_length": "full"},
        {"is_static": True, "draft_length": "adaptive"},
        {"draft_tree_size": None, "draft_length": "adaptive"},
        {"may_branch": False, "draft_length": "adaptive", "draft_tree_size": 9},
    ):
        assert sizes(**fields) == {None}


@pytest.mark.parametrize(("batch_size", "do_sample"), [(1, True), (3, False)])
def test_taking_turns_does_not_change_the_text(tiny_qwen3, monkeypatch, batch_size, do_sample):
    for name, value in (("FIRST_ROUNDS", 2), ("TURNS", 6), ("EACH", 1), ("AGAIN", 3)):
        monkeypatch.setattr(ways, name, value)
    monkeypatch.setattr(Pace, "_judge", lambda self: None)  # whatever the clock says
    prompts = torch.randint(4, 64, (batch_size, 11))
    options = {"do_sample": do_sample, "max_new_tokens": 60, "eos_token_id": -1}
    drafter = build_drafter(tiny_qwen3, draft_length="adaptive")
    torch.manual_seed(3)
    plain, proposed = tiny_qwen3.generate(prompts, **options), []
    with tree_faults(plain.tolist(), tiny_qwen3.config.vocab_size, ADAPTIVE_SIZE):
        for given in ({}, {"prompt_lookup_num_tokens": 5}):
            torch.manual_seed(3)
            text = tiny_qwen3.generate(prompts, assistant_model=drafter, **options, **given)
            assert torch.equal(text, plain)
            assert (drafter.stats.tree_size, drafter.stats.chain) == (ADAPTIVE_SIZE, None)
            proposed += itertools.chain(*drafter.stats.proposed)
    most = drafter.config.num_draft_tokens
    assert {count <= most for count in proposed if count} == {True, False}

"""Chances of trees are what rounds bring, and costs of widths are those measured."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from hf_domino.planner import best_length, costs_by_width, survival_from, tree_chances

SHARES = [[0.5, 0.2, 0.1], [0.6, 0.1], [0.3, 0.3, 0.05], [0.4]]
NUM_ROUNDS = 40_000


def likeliest_paths(num_nodes):
    """Paths of ranks from the anchor on, the likeliest ones of all that there are."""
    ranks = [range(len(shares)) for shares in SHARES]
    paths = [path for depth in range(1, len(SHARES) + 1) for path in product(*ranks[:depth])]
    chances = {path: prod(SHARES[depth][rank] for depth, rank in enumerate(path)) for path in paths}
    return dict(sorted(chances.items(), key=lambda item: (-item[1], len(item[0])))[:num_nodes])


@pytest.mark.parametrize("num_nodes", [1, 7, 100])
def test_chances_are_those_of_the_likeliest_nodes(num_nodes):
    assert tree_chances(SHARES, num_nodes) == pytest.approx(list(likeliest_paths(num_nodes).values()))


def test_a_chain_is_the_tree_of_one_candidate_a_depth():
    rates = [0.9, 0.5, 0.95, 0.2]
    assert tree_chances([[rate] for rate in rates], 10) == pytest.approx(survival_from(rates))


def test_costs_of_widths_lie_on_lines_and_choose_the_width():
    costs = costs_by_width({1: 10, 9: 12, 5: 11, 33: 36}, num_nodes=30, drafting=2)
    assert costs[:5] == pytest.approx([10, 12.25, 12.5, 12.75, 13])
    assert (costs[8], costs[9], len(costs)) == (14, 15, 31)
    assert best_length(tree_chances([[0.5, 0.2, 0.1]] * 6, 30), costs) == 8  # wider costs more than it brings


@pytest.mark.parametrize("shares", [[[0.5], [0.2, 0.3]], [[0.7, 0.4]], [[-0.1]]])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match=r"shares must be 0 or more, sum to 1 at most and not rise, got"):
        tree_chances(shares, 3)


@pytest.mark.parametrize("widths", [[], [5, 9], [1, 8]])
def test_widths_that_do_not_reach_are_refused(widths):
    with pytest.raises(ValueError, match="seconds must have times of 1 and of 9 or more positions, got"):
        costs_by_width(dict.fromkeys(widths, 1.0), num_nodes=8)

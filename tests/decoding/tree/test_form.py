"""The form of proposals: a chain written as a tree is that chain, and a path is found by what was chosen."""

from __future__ import annotations

import torch

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.tree.form import Tree, along

TOKENS = torch.tensor([[4, 7, 9, 2], [5, 5, 6, 8]])
PREFIXES = Prefixes(torch.tensor([[1, 2, 3, 0], [9, 8, 0, 0]]), [3, 2], [0, 4])
# Anchor to 4 and 7; 4 to 9 and 2; 9 to 5; 7 to 6.
BRANCHED = Tree(torch.tensor([[4, 7, 9, 2, 5, 6]]), torch.tensor([[0, 0, 1, 1, 3, 2]]), 3)


def test_a_chain_written_as_a_tree_is_that_chain():
    chain, tree = Tree(TOKENS), Tree(TOKENS, torch.arange(4).expand(2, -1))
    assert torch.equal(chain.depths, tree.depths)
    assert torch.equal(chain.sees, tree.sees)
    ours, theirs = tree.seen_by(PREFIXES), chain.seen_by(PREFIXES)
    assert (ours.lengths, ours.rows) == (theirs.lengths, theirs.rows)
    for row, other, length in zip(ours.ids, theirs.ids, ours.lengths, strict=True):
        assert row[:length].tolist() == other[:length].tolist()
    for chosen in ([4, 7, 1, 2, 3], [4, 7, 9, 2, 3], [1, 7, 9, 2, 3]):
        chosen = torch.tensor([chosen, [5, 1, 6, 8, 0]])
        counts, path = tree.accepted(chosen)
        assert torch.equal(counts, chain.accepted(chosen)[0])
        for row, count in enumerate(counts[:, 0].tolist()):
            assert path[row, : count + 1].tolist() == list(range(count + 1))
    scores, noise = torch.randn(2, 5, 11), torch.empty(2, 5, 11).exponential_()
    for ours, theirs in zip(tree.race(scores, noise), chain.race(scores, noise), strict=True):
        assert torch.equal(ours, theirs)


def test_positions_of_a_branched_tree():
    assert BRANCHED.depths.tolist() == [[0, 1, 1, 2, 2, 3, 2]]
    seen = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5], [0, 2, 6]]
    assert [row.nonzero()[:, 0].tolist() for row in BRANCHED.sees[0]] == seen
    prefixes = BRANCHED.seen_by(Prefixes.of(torch.tensor([[1, 2, 3]])))
    texts = [row[:length].tolist() for row, length in zip(prefixes.ids, prefixes.lengths, strict=True)]
    behind = [[], [4], [7], [4, 9], [4, 2], [4, 9, 5], [7, 6]]
    assert texts == [[1, 2, 3, *path] for path in behind]


def test_what_was_chosen_finds_the_path():
    for right, positions in (([4, 9, 5, 1], [0, 1, 3, 5]), ([4, 2, 1], [0, 1, 4]), ([7, 6, 1], [0, 2, 6]), ([1], [0])):
        chosen = torch.full((1, 7), 10)
        chosen[0, positions] = torch.tensor(right)
        counts, path = BRANCHED.accepted(chosen)
        assert int(counts) == len(positions) - 1
        assert path[0, : len(positions)].tolist() == positions
        assert along(path[:, : len(positions)], chosen)[0].tolist() == right


def test_a_right_node_behind_a_wrong_one_is_not_accepted():
    chosen = torch.tensor([[7, 10, 10, 5, 10, 10, 10]])  # 5 stands behind 9, which was not chosen
    counts, path = BRANCHED.accepted(chosen)
    assert int(counts) == 1
    assert path[0, :2].tolist() == [0, 2]


def test_each_position_races_with_the_noise_of_its_depth():
    scores, noise = torch.randn(1, 7, 11), torch.empty(1, 4, 11).exponential_()
    tokens = BRANCHED.race(scores, noise)[1]
    for position, depth in enumerate(BRANCHED.depths[0].tolist()):
        assert int(tokens[0, position]) == int((scores[0, position].softmax(-1) / noise[0, depth]).argmax())

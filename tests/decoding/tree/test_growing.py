"""Trees grow to the likeliest nodes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from builders import EOS, build_drafter
from drafts import branches_of
from rederived import Rederived
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from hf_domino.decoding.branches import SHARPNESS
from hf_domino.decoding.growing import grow
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.stopping import KnownStops
from hf_domino.targets.view import TargetModel

DEPTH, UNLIKELY = 3, -5.0
PREFIXES, LAW = Prefixes.of(torch.tensor([[5, 9, 33]])), TokenDistribution(LogitsProcessorList())
LAWS = {
    "greedy": [],
    "penalised": [RepetitionPenaltyLogitsProcessor(1.5)],
    "drawn": [TemperatureLogitsWarper(0.7)],
    "drawn and penalised": [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(1.3)],
}


def paths_of(grown, row=0):
    """The tokens from the anchor to each node, and its chance."""
    paths = [()]
    parents = range(grown.num_nodes) if grown.parents is None else grown.parents[row].tolist()
    for token, parent in zip(grown.tokens[row].tolist(), parents, strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], grown.chances[row].tolist(), strict=True))


@torch.no_grad()
def chances_of_all(drafter, target, hidden, prefixes, distribution, noise):
    """Log-chance of every sequence of at most DEPTH tokens behind no unlikely one, by formulas, each on its own."""
    rederived, found, first = Rederived(drafter, target.model), {(): 0.0}, drafter.config.label_offset
    block = torch.nn.functional.pad(hidden, (0, 0, first, drafter.config.block_size - first - DEPTH))[0]
    for depth in range(DEPTH):
        open_paths = [path for path in found if len(path) == depth and EOS not in path and found[path] > UNLIKELY]
        for path in open_paths:
            chosen = torch.tensor([*path, *[0] * (drafter.config.block_size - depth)])
            logits = rederived.correct(block, prefixes.last()[0, 0], chosen)[1][None, depth]
            continuation = torch.tensor([path], dtype=torch.long).view(1, -1)
            scores = (
                SHARPNESS
                * distribution.scores(prefixes, logits[:, None], partial(prefixes.along, continuation, 1))[0, 0]
            )
            chances = (scores if noise is None else scores - noise[0, depth].log()).log_softmax(dim=0)
            found |= {(*path, token): found[path] + float(chances[token]) for token in range(len(chances))}
    return {path: chance for path, chance in found.items() if path}


def behind(drafter, model, prefixes, depth=DEPTH, distribution=LAW, noise=None, **options):
    """Trees behind these prefixes, and what else tells their nodes' chances."""
    target, generator = TargetModel(model), torch.Generator().manual_seed(3)
    hidden = torch.randn(len(prefixes.ids), depth, drafter.config.hidden_size, generator=generator)
    options = {"num_nodes": 20} | options
    branches = branches_of(drafter, target, hidden, prefixes, distribution, noise, is_tree=True)
    return grow(branches, **options), (
        drafter,
        target,
        hidden,
        prefixes,
        distribution,
        noise,
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(LAWS))
def test_the_nodes_are_the_likeliest_of_all(tiny_qwen3, kind):
    distribution = TokenDistribution(LogitsProcessorList(LAWS[kind]), KnownStops(frozenset({EOS})))
    noise = torch.empty(1, DEPTH, 64).exponential_() if "drawn" in kind else None
    drafter = build_drafter(tiny_qwen3, draft_pool_size=None)
    grown, parts = behind(drafter, tiny_qwen3, PREFIXES, distribution=distribution, noise=noise, num_nodes=8)
    expected = chances_of_all(*parts)
    best = dict(sorted(expected.items(), key=lambda item: -item[1])[:8])
    assert min(best.values()) > UNLIKELY
    found = paths_of(grown)
    assert found.keys() == best.keys()
    for path, chance in best.items():
        assert found[path] == pytest.approx(math.exp(chance), rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["greedy", "penalised"])
def test_rows_of_a_batch_grow_as_if_each_were_alone(tiny_qwen3, kind):
    drafter, distribution = (
        build_drafter(tiny_qwen3, draft_pool_size=12),
        TokenDistribution(LogitsProcessorList(LAWS[kind])),
    )
    prefixes = Prefixes(torch.randint(4, 30, (3, 40)), [40, 33, 28], [0, 1, 2])
    together, (_, target, hidden, *_) = behind(drafter, tiny_qwen3, prefixes, distribution=distribution, num_nodes=9)
    for row in range(3):
        own = Prefixes(prefixes.ids[row : row + 1], [prefixes.lengths[row]], [row])
        alone = grow(branches_of(drafter, target, hidden[row : row + 1], own, distribution, is_tree=True), 9)
        expected = paths_of(alone)
        found = {path: chance for path, chance in paths_of(together, row).items() if chance > 1e-6}
        assert found.keys() >= expected.keys()
        assert all(found[path] == pytest.approx(chance, rel=1e-4) for path, chance in expected.items())


def test_nothing_grows_below_the_least_chance_or_behind_an_end(tiny_qwen3):
    grow = partial(behind, build_drafter(tiny_qwen3, draft_pool_size=None), tiny_qwen3, PREFIXES, 6)
    whole, _ = grow()
    priced, _ = grow(least_chance=0.02)
    likely = {path for path, chance in paths_of(whole).items() if chance > 0.02}
    assert 0 < len(likely) < 20
    assert paths_of(priced).keys() == likely
    first = int(whole.tokens[0, 0])
    ended, _ = grow(distribution=TokenDistribution(LogitsProcessorList(), KnownStops(frozenset({first}))))
    assert (first,) in paths_of(ended)
    assert not any(first in path[:-1] for path in paths_of(ended))


def test_the_likeliest_path_comes_first_and_is_all_where_branches_do_not_pay(tiny_qwen3):
    grow = partial(behind, build_drafter(tiny_qwen3, draft_pool_size=None), tiny_qwen3, PREFIXES, 6)
    found, trunk = paths_of(grow()[0]), [()]
    while children := {path: chance for path, chance in found.items() if path[:-1] == trunk[-1]}:
        trunk.append(max(children, key=children.get))
    assert list(found)[: len(trunk) - 1] == trunk[1:]
    price = 0.06  # of what stands beside the trunk there is less than six nodes are worth
    beside = [chance for path, chance in found.items() if chance > price and path not in trunk]
    assert 0 < sum(beside) < price * (len(beside) + 6)
    alone, _ = grow(least_chance=price)
    assert alone.parents is None
    assert list(paths_of(alone)) == [path for path in trunk[1:] if found[path] > price]

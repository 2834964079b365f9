"""Trees grow to the likeliest nodes, and what was verified makes chances truer."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from builders import EOS, build_drafter
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from hf_domino.decoding.correcting.corrections import Corrections
from hf_domino.decoding.matches import Text
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.stopping import KnownStops
from hf_domino.decoding.tree.chances import Chances, Sharpness
from hf_domino.decoding.tree.copies import CopyLanes
from hf_domino.decoding.tree.growing import grow_tree
from hf_domino.target.view import TargetModel

DEPTH, ALPHA, UNLIKELY = 3, 1.4, -5.0
PREFIXES, LAW = Prefixes.of(torch.tensor([[5, 9, 33]])), TokenLaw(LogitsProcessorList())
LAWS = {
    "greedy": [],
    "penalised": [RepetitionPenaltyLogitsProcessor(1.5)],
    "drawn": [TemperatureLogitsWarper(0.7)],
    "drawn and penalised": [RepetitionPenaltyLogitsProcessor(1.5), TemperatureLogitsWarper(1.3)],
}


def paths_of(grown, row=0):
    """The tokens from the anchor to each node, and its chance."""
    tree, paths = grown.tree, [()]
    parents = range(tree.num_nodes) if tree.parents is None else tree.parents[row].tolist()
    for token, parent in zip(tree.tokens[row].tolist(), parents, strict=True):
        paths.append((*paths[parent], token))
    return dict(zip(paths[1:], grown.chances[row].tolist(), strict=True))


def chances(sharpness):
    known = Chances()
    known.sharpness.value = sharpness
    return known


@torch.no_grad()
def chances_of_all(drafter, target, hidden, prefixes, law, noise):
    """Log-chance of every sequence of at most DEPTH tokens behind no unlikely one, by formulas, each on its own."""
    base, found = target.logits(hidden), {(): 0.0}
    for depth in range(DEPTH):
        open_paths = [path for path in found if len(path) == depth and EOS not in path and found[path] > UNLIKELY]
        for path in open_paths:
            corrections = Corrections(drafter, target, hidden, prefixes.last()[:, 0])
            for token in path:
                corrections.read(torch.tensor([token]))
            logits = corrections.apply(depth, base[:, depth])
            continuation = torch.tensor([path], dtype=torch.long).view(1, -1)
            scores = ALPHA * law.scores(prefixes, logits[:, None], continuation)[0, 0]
            chances = (scores if noise is None else scores - noise[0, depth].log()).log_softmax(dim=0)
            found |= {(*path, token): found[path] + float(chances[token]) for token in range(len(chances))}
    return {path: chance for path, chance in found.items() if path}


def behind(drafter, model, prefixes, depth=DEPTH, law=LAW, noise=None, **options):
    """Trees behind these prefixes, and what else tells their nodes' chances."""
    target, generator = TargetModel(model, drafter.config), torch.Generator().manual_seed(3)
    hidden = torch.randn(len(prefixes.ids), depth, drafter.config.hidden_size, generator=generator)
    options = {"num_nodes": 20} | options
    return grow_tree(drafter, target, hidden, prefixes, law, noise, **options), (
        drafter,
        target,
        hidden,
        prefixes,
        law,
        noise,
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(LAWS))
def test_the_nodes_are_the_likeliest_of_all(tiny_qwen3, kind):
    law = TokenLaw(LogitsProcessorList(LAWS[kind]), KnownStops(frozenset({EOS})))
    noise = torch.empty(1, DEPTH, 64).exponential_() if "drawn" in kind else None
    drafter, known = build_drafter(tiny_qwen3, draft_pool_size=None), chances(ALPHA)
    grown, parts = behind(drafter, tiny_qwen3, PREFIXES, law=law, noise=noise, num_nodes=8, chances=known)
    expected = chances_of_all(*parts)
    best = dict(sorted(expected.items(), key=lambda item: -item[1])[:8])
    assert min(best.values()) > UNLIKELY
    found = paths_of(grown)
    assert found.keys() == best.keys()
    for path, chance in best.items():
        assert found[path] == pytest.approx(math.exp(chance), rel=1e-4)
        races = list(grown.decided(0, path))  # that would teach, were this the target's text
        drafted = [float(known.drafted(one.scores, one.luck)[one.token_ids == one.token]) for one in races]
        assert len(races) == len(path)
        assert math.prod(drafted) == pytest.approx(math.exp(chance), rel=1e-4)


def test_nothing_grows_below_the_least_chance_or_behind_an_end(tiny_qwen3):
    grow = partial(
        behind, build_drafter(tiny_qwen3, draft_pool_size=None), tiny_qwen3, PREFIXES, 6, chances=chances(1.0)
    )
    whole, _ = grow()
    priced, _ = grow(least_chance=0.02)
    likely = {path for path, chance in paths_of(whole).items() if chance > 0.02}
    assert 0 < len(likely) < 20
    assert paths_of(priced).keys() == likely
    first = int(whole.tree.tokens[0, 0])
    ended, _ = grow(law=TokenLaw(LogitsProcessorList(), KnownStops(frozenset({first}))))
    assert (first,) in paths_of(ended)
    assert not any(first in path[:-1] for path in paths_of(ended))


def test_the_likeliest_path_comes_first_and_is_all_where_branches_do_not_pay(tiny_qwen3):
    grow = partial(
        behind, build_drafter(tiny_qwen3, draft_pool_size=None), tiny_qwen3, PREFIXES, 6, chances=chances(1.0)
    )
    found, trunk = paths_of(grow()[0]), [()]
    while children := {path: chance for path, chance in found.items() if path[:-1] == trunk[-1]}:
        trunk.append(max(children, key=children.get))
    assert list(found)[: len(trunk) - 1] == trunk[1:]
    price = 0.06  # of what stands beside the trunk there is less than six nodes are worth
    beside = [chance for path, chance in found.items() if chance > price and path not in trunk]
    assert 0 < sum(beside) < price * (len(beside) + 6)
    alone, _ = grow(least_chance=price)
    assert alone.tree.parents is None
    assert list(paths_of(alone)) == [path for path in trunk[1:] if found[path] > price]


@pytest.mark.parametrize("has_noise", [False, True])
def test_sharpness_is_learnt_from_winners(has_noise):
    generator, sharpness = torch.Generator().manual_seed(0), Sharpness()
    for _ in range(300):
        scores = 2.0 * torch.randn(4, 32, generator=generator)
        winners = (2.5 * scores).softmax(dim=1).multinomial(1, generator=generator)[:, 0]
        luck = None
        if has_noise:  # the target draws by the same noise
            luck = -torch.empty(4, 32).exponential_(generator=generator).log()
            gumbel = -torch.empty(4, 32).exponential_(generator=generator).log()
            winners = (2.5 * scores + luck + gumbel).argmax(dim=1)
        sharpness.observe(scores, luck, winners)
    assert sharpness.value == pytest.approx(2.5, rel=0.15)

    taught, scores = sharpness.value, torch.zeros(1, 4)
    scores[0, 1] = torch.inf
    sharpness.observe(scores, None, torch.tensor([1]))  # a round without a law
    assert sharpness.value == taught


COPIED = [*range(5, 30), *range(5, 30), 5, 6, 7]


def copying(drafter, target, text, **options):
    """A tree behind a text that it may copy from, twelve tokens deep."""
    known = Text()
    known.extend(text)
    prefixes = Prefixes.of(torch.tensor([text]))
    return behind(drafter, target, prefixes, copies=CopyLanes([known], 12, 64), **options)[0]


@pytest.mark.parametrize("pool_size", [None, 4])
def test_copies_are_branches_and_go_deeper_than_drafts(tiny_qwen3, pool_size):
    drafter, known = build_drafter(tiny_qwen3, draft_pool_size=pool_size), Chances()
    drafted = paths_of(copying(drafter, tiny_qwen3, COPIED[:3], chances=known))  # nothing to copy
    found, chance = paths_of(copying(drafter, tiny_qwen3, COPIED, chances=known)), 1.0
    for depth in range(12):
        weights, path = known.beside if depth < DEPTH else known.deeper, tuple(range(8, 9 + depth))
        copied, chance = chance * weights.weight(28 + depth), found[path]
        assert chance == pytest.approx(copied, rel=1e-5) if depth >= DEPTH else chance >= copied * (1 - 1e-5)
    assert max(map(len, drafted)) <= DEPTH < max(map(len, found)) == 12


def test_copies_are_believed_as_far_as_they_come_true(tiny_qwen3):
    drafter, right, wrong = build_drafter(tiny_qwen3), Chances(), Chances()
    for known, token in ((right, 8), (wrong, 60)):
        for _ in range(40):
            known.observe(list(copying(drafter, tiny_qwen3, COPIED, chances=known).decided(0, [token])))
    first = Chances().beside.weight(28)
    assert wrong.beside.weight(28) < 0.5 * first
    assert right.beside.weight(28) > first
    assert right.beside.weight(2) == Chances().beside.weight(2)


def test_rows_whose_lanes_have_ended_grow_beside_rows_that_go_on(tiny_qwen3):
    rows, texts = torch.tensor([[5, 6, 7, 8, 5, 6, 7], [40, 41, 42, 43, 44, 45, 46]]), [Text(), Text()]
    for text, row in zip(texts, rows.tolist(), strict=True):
        text.extend(row)
    law = TokenLaw(LogitsProcessorList(), KnownStops(frozenset(range(9, 64))))  # all but what is copied
    options = {"law": law, "copies": CopyLanes(texts, 12, 64), "chances": Chances()}
    grown, _ = behind(build_drafter(tiny_qwen3, draft_pool_size=4), tiny_qwen3, Prefixes.of(rows), **options)
    assert (8, 5, 6, 7, 8) in paths_of(grown, 0)
    for row in (0, 1):
        paths = paths_of(grown, row)
        assert not any(token > 8 for path, chance in paths.items() if chance for token in path[:-1])

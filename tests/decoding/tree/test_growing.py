"""Trees grow to the likeliest nodes, and what was verified makes chances truer."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from builders import EOS, build_drafter
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from hf_domino.decoding.correcting.corrections import Corrections
from hf_domino.decoding.matches import Text
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.stopping import KnownStops
from hf_domino.decoding.tree import growing
from hf_domino.decoding.tree.chances import Chances, Decided, Race, Sharpness
from hf_domino.decoding.tree.copies import CopyLanes
from hf_domino.decoding.tree.growing import grow_tree
from hf_domino.decoding.verification import judge
from hf_domino.target.view import TargetModel

DEPTH, ALPHA, UNLIKELY = 3, 1.4, -5.0
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


@torch.no_grad()
@pytest.mark.parametrize("kind", sorted(LAWS))
def test_the_nodes_are_the_likeliest_of_all(tiny_qwen3, kind):
    drafter = build_drafter(tiny_qwen3, draft_pool_size=None)
    target, prefixes = TargetModel(tiny_qwen3, drafter.config), Prefixes.of(torch.tensor([[5, 9, 33]]))
    law = TokenLaw(LogitsProcessorList(LAWS[kind]), KnownStops(frozenset({EOS})))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, DEPTH, drafter.config.hidden_size, generator=generator)
    noise = torch.empty(1, DEPTH, 64).exponential_(generator=generator) if "drawn" in kind else None
    known = chances(ALPHA)
    grown = grow_tree(drafter, target, hidden, prefixes, law, noise, num_nodes=8, chances=known)
    expected = chances_of_all(drafter, target, hidden, prefixes, law, noise)
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
    drafter = build_drafter(tiny_qwen3, draft_pool_size=None)
    target, prefixes = TargetModel(tiny_qwen3, drafter.config), Prefixes.of(torch.tensor([[5, 9, 33]]))
    hidden = torch.randn(1, 6, drafter.config.hidden_size, generator=torch.Generator().manual_seed(3))
    law = TokenLaw(LogitsProcessorList())
    options = {"num_nodes": 20, "chances": chances(1.0)}
    whole = grow_tree(drafter, target, hidden, prefixes, law, **options)
    priced = grow_tree(drafter, target, hidden, prefixes, law, least_chance=0.02, **options)
    likely = {path for path, chance in paths_of(whole).items() if chance > 0.02}
    assert 0 < len(likely) < 20
    assert paths_of(priced).keys() == likely
    first = int(whole.tree.tokens[0, 0])
    ended = TokenLaw(LogitsProcessorList(), KnownStops(frozenset({first})))
    paths = paths_of(grow_tree(drafter, target, hidden, prefixes, ended, **options))
    assert (first,) in paths
    assert not any(first in path[:-1] for path in paths)


def test_the_likeliest_path_comes_first_and_is_all_where_branches_do_not_pay(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3, draft_pool_size=None)
    target, prefixes = TargetModel(tiny_qwen3, drafter.config), Prefixes.of(torch.tensor([[5, 9, 33]]))
    hidden = torch.randn(1, 6, drafter.config.hidden_size, generator=torch.Generator().manual_seed(3))
    options = {"num_nodes": 20, "chances": chances(1.0)}
    whole = grow_tree(drafter, target, hidden, prefixes, TokenLaw(LogitsProcessorList()), **options)
    found, trunk = paths_of(whole), [()]
    while children := {path: chance for path, chance in found.items() if path[:-1] == trunk[-1]}:
        trunk.append(max(children, key=children.get))
    assert list(found)[: len(trunk) - 1] == trunk[1:]
    price = 0.06  # of what stands beside the trunk there is less than six nodes are worth
    beside = [chance for path, chance in found.items() if chance > price and path not in trunk]
    assert 0 < sum(beside) < price * (len(beside) + 6)
    alone = grow_tree(drafter, target, hidden, prefixes, TokenLaw(LogitsProcessorList()), least_chance=price, **options)
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


def test_a_round_without_a_law_teaches_nothing():
    sharpness, scores = Sharpness(), torch.zeros(1, 4)
    scores[0, 1] = torch.inf
    sharpness.observe(scores, None, torch.tensor([1]))
    assert sharpness.value == Sharpness().value


def copying(drafter, target, text, **options):
    """A tree behind a text that it may copy from, twelve tokens deep."""
    prefixes, known = Prefixes.of(torch.tensor([text])), Text()
    known.extend(text)
    hidden = torch.randn(1, DEPTH, drafter.config.hidden_size, generator=torch.Generator().manual_seed(3))
    law, copies = TokenLaw(LogitsProcessorList()), CopyLanes([known], 12, 64)
    return grow_tree(drafter, target, hidden, prefixes, law, copies=copies, num_nodes=20, **options)


@pytest.mark.parametrize("pool_size", [None, 4])
def test_copies_are_branches_and_go_deeper_than_drafts(tiny_qwen3, pool_size):
    drafter = build_drafter(tiny_qwen3, draft_pool_size=pool_size)
    target, text = TargetModel(tiny_qwen3, drafter.config), [*range(5, 30), *range(5, 30), 5, 6, 7]
    known = Chances()
    drafted = paths_of(copying(drafter, target, text[:3], chances=known))  # nothing to copy
    found = paths_of(copying(drafter, target, text, chances=known))
    weights = [known.beside.weight(28 + depth) for depth in range(DEPTH)]
    weights += [known.deeper.weight(28 + depth) for depth in range(DEPTH, 12)]
    chance = 1.0
    for depth, weight in enumerate(weights):
        copied, path = chance * weight, tuple(range(8, 9 + depth))
        chance = found[path]
        if depth >= DEPTH:
            assert chance == pytest.approx(copied, rel=1e-5)
        elif depth == 0 and path in drafted:
            assert chance == pytest.approx(copied + (1 - weight) * drafted[path], rel=1e-4)
        else:
            assert chance >= copied * (1 - 1e-5)
    assert max(map(len, drafted)) <= DEPTH < max(map(len, found)) == 12


def test_copies_are_believed_as_far_as_they_come_true(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3)
    target, text = TargetModel(tiny_qwen3, drafter.config), [*range(5, 30), *range(5, 30), 5, 6, 7]
    right, wrong = Chances(), Chances()
    for known, token in ((right, 8), (wrong, 60)):
        for _ in range(40):
            grown = copying(drafter, target, text, chances=known)
            known.observe(list(grown.decided(0, [token])))
    first = Chances().beside.weight(28)
    assert wrong.beside.weight(28) < 0.5 * first
    assert right.beside.weight(28) > first
    assert right.beside.weight(2) == Chances().beside.weight(2)


@pytest.mark.parametrize("luck", [None, torch.linspace(-1, 3, 6).view(2, 3)], ids=["greedy", "drawn"])
def test_one_child_is_the_targets_with_copies_too(luck):
    """A copy is a candidate of the drafter's, another token, or none; whatever it is, chances add up to 1."""
    scores, ids = torch.linspace(0, 4, 12).view(2, 2, 3), torch.tensor([[5, 6, 7], [8, 9, 10]])
    copied = [[(6, 4), (20, 12)], [(0, 0), (8, 2)]]
    for race in (Race(scores, luck, ids), Race(scores, luck, ids, copied)):
        found, _ = Chances().of(race)
        torch.testing.assert_close(found.sum(dim=2), torch.ones(2, 2))


def test_rows_whose_lanes_have_ended_grow_beside_rows_that_go_on(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3, draft_pool_size=4)
    target = TargetModel(tiny_qwen3, drafter.config)
    rows, texts = torch.tensor([[5, 6, 7, 8, 5, 6, 7], [40, 41, 42, 43, 44, 45, 46]]), [Text(), Text()]
    for text, row in zip(texts, rows.tolist(), strict=True):
        text.extend(row)
    hidden = torch.randn(2, DEPTH, drafter.config.hidden_size, generator=torch.Generator().manual_seed(3))
    ends = KnownStops(frozenset(range(9, 64)))  # all but what is copied
    law, copies = TokenLaw(LogitsProcessorList(), ends), CopyLanes(texts, 12, 64)
    options = {"num_nodes": 20, "chances": Chances()}
    grown = grow_tree(drafter, target, hidden, Prefixes.of(rows), law, copies=copies, **options)
    assert (8, 5, 6, 7, 8) in paths_of(grown, 0)
    for row in (0, 1):
        paths = paths_of(grown, row)
        assert not any(token > 8 for path, chance in paths.items() if chance for token in path[:-1])


def test_what_has_no_logits_is_not_copied():
    text = Text()
    text.extend([5, 6, 99, 5, 6])
    assert CopyLanes([text], 4, 64).found(0) == [[(0, 0)]]
    assert CopyLanes([text], 4, 100).found(0) == [[(99, 2)]]


def test_rows_teach_their_own_races():
    scores, ids = torch.tensor([5.0, 0.0]), torch.tensor([7, 8])
    drafted = Decided(7, (7, 2), scores, None, ids)  # sure without the copy, too
    deeper = Decided(9, (9, 2))
    rows = Chances(), Chances()
    rows[0].observe([drafted, deeper, drafted])
    rows[1].observe([drafted, drafted, deeper])
    for weights in ("beside", "deeper"):
        assert getattr(rows[0], weights).weight(2) == pytest.approx(getattr(rows[1], weights).weight(2))
    assert rows[0].beside.weight(2) < rows[0].deeper.weight(2)


@pytest.mark.parametrize("is_fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("kind", ["greedy", "drawn"])
def test_elsewhere_than_on_a_cpu_nothing_is_read_back(tiny_qwen3, kind, is_fused, monkeypatch):
    monkeypatch.setattr(growing, "fits_kernels", lambda *arguments: is_fused)
    with torch.device("meta"):  # any value that was read, and any tensor left on the CPU, would raise
        model = copy.deepcopy(tiny_qwen3).to("meta")
        drafter = build_drafter(tiny_qwen3, draft_pool_size=16).to("meta")
        target, prefixes = TargetModel(model, drafter.config), Prefixes.of(torch.zeros(2, 3, dtype=torch.long))
        law = TokenLaw(LogitsProcessorList(LAWS[kind]), KnownStops(frozenset({EOS})))
        noise = torch.ones(2, 1 + DEPTH, 64) if kind == "drawn" else None
        hidden = torch.zeros(2, DEPTH, drafter.config.hidden_size)
        grown = grow_tree(drafter, target, hidden, prefixes, law, noise, num_nodes=20, chances=Chances())
        assert grown.tree.tokens.shape == (2, 20)
        judgement = judge(law, prefixes, grown.tree, torch.zeros(2, 21, 64), noise)
        assert judgement.path.shape == (2, DEPTH + 1)

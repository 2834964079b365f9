"""Token recycling (arXiv 2408.08696): the table and the trees, written out beside the package."""

from __future__ import annotations

import contextlib
import copy
import importlib
import time

import pytest
import torch
from calls_of_methods import PROMPTS, SAMPLED, TEMPERATURE, calls, generate, noise_of

import hf_domino
from hf_domino.decoding.estimates import NOMINAL_PROPOSAL
from hf_domino.decoding.recycling import RecyclingSession

SUCCESSORS, KEPT = 8, 0.6
recycling = importlib.import_module("hf_domino.methods.recycling")  # the package has a function of this name
KINDS = {"trees": {"draft_tree_size": 24}, "chains": {"draft_tree_size": None}}


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    """Few rows for pairs, so that some pairs replace others."""
    monkeypatch.setattr(recycling, "NUM_PAIRS", 1009)


@pytest.fixture
def drafter(wide):
    return hf_domino.recycling(wide, draft_length="full").double()


@contextlib.contextmanager
def seen_by(target):
    """Chances of each token's successors, from what goes through the target behind its first forward."""
    table, forwards = {}, []

    def watch(module, args, kwargs, outputs):
        forwards.append(kwargs["input_ids"])
        if len(forwards) > 1:  # the first is the prompt's
            read(table, kwargs["input_ids"].flatten().tolist(), outputs.logits.flatten(0, 1))

    handle = target.register_forward_hook(watch, with_kwargs=True)
    yield table
    handle.remove()


def read(table, keys, logits):
    """Average what was seen at each key with what its row held before; the first of equal keys counts."""
    found = {}
    for key, row in zip(keys, logits, strict=True):
        best = row.topk(SUCCESSORS)
        chances = dict(zip(best.indices.tolist(), best.values.softmax(dim=0).tolist(), strict=True))
        if key not in found:
            found[key] = averaged(table[key], chances) if key in table else chances
    table.update(found)


def averaged(old, new):
    chances = {token: KEPT * old.get(token, 0.0) + (1 - KEPT) * new.get(token, 0.0) for token in {*old, *new}}
    return dict(sorted(chances.items(), key=lambda each: -each[1])[:SUCCESSORS])


def row_of(token_ids, scores):
    """The chances of a row, by their tokens."""
    return dict(zip(token_ids.tolist(), scores.exp().tolist(), strict=True))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_plain_and_the_table_holds_averages_of_what_the_target_predicted(
    wide, drafter, kind, batch_size, do_sample, cache
):
    drafter, (ids, options) = drafter.view(**KINDS[kind]), calls(batch_size)
    options |= SAMPLED if do_sample else {}
    plain = generate(wide, None, ids, **options)
    options |= {"cache_implementation": cache}
    # This tries trees and batches out.
    generate(wide, hf_domino.recycling(wide, draft_length="full").double(), ids, **options)
    with seen_by(wide) as table:
        assert torch.equal(generate(wide, drafter, ids, **options), plain)
    assert max(length for row in drafter.stats.rows for length in row) > 1
    assert len(table) > 10
    for token in range(wide.config.vocab_size):
        scores = drafter.scores[token]
        if token in table:
            assert row_of(drafter.successors[token], scores) == pytest.approx(table[token])
        else:
            assert scores.isneginf().all()
    first = sum(len(row) for row in drafter.stats.rows)
    assert torch.equal(generate(wide, drafter, ids, **options), plain)
    if not do_sample and batch_size == 1:  # what one call has seen serves the next
        assert sum(len(row) for row in drafter.stats.rows) < first


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_tree_is_the_likeliest_paths_of_the_table(wide, drafter, monkeypatch, rounds, do_sample):
    tables, propose = [], RecyclingSession.propose

    def keep(self, *args, **kwargs):
        tables.append(copy.deepcopy(drafter))
        return propose(self, *args, **kwargs)

    monkeypatch.setattr(RecyclingSession, "propose", keep)
    trees, (ids, options) = drafter.view(draft_tree_size=5, block_size=3), calls(1)
    generate(wide, trees, ids, **options, **(SAMPLED if do_sample else {}))
    assert trees.stats.chain is None
    noise, num_compared = noise_of(1, wide.config.vocab_size), 0
    for (_, text, paths, alpha), table in zip(rounds, tables, strict=True):
        if not paths:  # no successor has been seen
            continue
        step = len(text) - len(PROMPTS[0])
        divisor, found = TEMPERATURE if do_sample else 1.0, {}
        for path, chance in paths.items():
            expected = 1.0
            words = [*text[-2:], *path]
            for depth, token in enumerate(path):
                successors, scores = table.successors_of(*torch.tensor(words[depth : depth + 2]).flip(0))
                sampled = alpha * scores / divisor
                if do_sample:
                    sampled = sampled - noise[step + depth, 0, successors].log()
                place = successors.tolist().index(token)
                expected *= float(sampled.softmax(dim=-1).nan_to_num(0.0)[place])
            found[path] = expected
            assert chance == pytest.approx(expected, rel=1e-5)
            num_compared += expected > 0
        # None of the first depth that was left out is likelier than the least of the tree.
        successors, scores = table.successors_of(*torch.tensor(text[-2:]).flip(0))
        sampled = alpha * scores / divisor
        sampled = sampled - noise[step, 0, successors].log() if do_sample else sampled
        left_out = [
            chance
            for token, chance in zip(successors.tolist(), sampled.softmax(dim=-1).tolist(), strict=True)
            if (token,) not in paths
        ]
        if len(paths) == 5:
            assert max(left_out) <= min(found.values()) + 1e-9
    assert num_compared > 20


def test_pairs_have_successors_of_their_own(wide, drafter):
    """A pair that was seen last has its row; another one that falls on the same row has that of its last token."""
    vocab_size = wide.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens, pairs, rows = {}, {}, {}  # what the rows of tokens and of pairs hold, and the pair that each row is of
    for _ in range(400):
        after, before = torch.randint(vocab_size, (2, 5), generator=generator)
        logits = 4 * torch.randn(5, vocab_size, generator=generator).double()
        drafter.keep(*drafter.learn(after, before, logits))
        read(tokens, after.tolist(), logits)
        owners = {}
        for pair in zip(before.tolist(), after.tolist(), strict=True):
            owners.setdefault((pair[0] * vocab_size + pair[1]) % 1009, pair)
        for row, pair in owners.items():
            if rows.get(row) != pair:
                pairs.pop(rows.get(row), None)
        kept = [list(zip(before.tolist(), after.tolist(), strict=True)).index(pair) for pair in owners.values()]
        read(pairs, list(owners.values()), logits[kept])
        rows |= owners
    assert 500 < len(pairs) < 1009
    for before in range(vocab_size):
        for token in range(0, vocab_size, 5):
            found = drafter.successors_of(torch.tensor(token), torch.tensor(before))
            assert row_of(*found) == pytest.approx(pairs.get((before, token), tokens[token]))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_each_proposal_is_learnt_with_the_token_before_it(wide, drafter, rounds, monkeypatch, kind, batch_size):
    learn, learnt = recycling.RecyclingModel.learn, []

    def record(self, tokens, before, logits):
        learnt.append((len(rounds), list(zip(before.tolist(), tokens.tolist(), strict=True))))
        return learn(self, tokens, before, logits)

    monkeypatch.setattr(recycling.RecyclingModel, "learn", record)
    ids, options = calls(batch_size)
    generate(wide, drafter.view(**KINDS[kind]), ids, **options)
    num_compared = start = 0
    for end, pairs in learnt:
        width = len(pairs) // (end - start)
        for row, (_, text, proposals, _) in enumerate(rounds[start:end]):
            if isinstance(proposals, dict):
                paths = list(proposals)
            else:
                paths = [tuple(proposals[:length]) for length in range(1, len(proposals) + 1)]
            expected = [tuple(text[-2:]), *((text[-1], *path)[-2:] for path in paths)]
            # `rounds` tells nodes apart by their paths, of which a sequence of a batch may have one twice.
            found = pairs[row * width : (row + 1) * width]
            assert set(found) == set(expected)
            num_compared += len(paths)
        start = end
    assert num_compared > 20


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_call_with_broken_embeddings_spoils_nothing_that_was_learnt(wide, drafter, cache, value):
    ids, options = calls(1)
    options |= {"cache_implementation": cache}
    generate(wide, drafter, ids, **options)
    embeddings = wide.get_input_embeddings()(ids)
    embeddings[:, -3] = value
    broken = {"inputs_embeds": embeddings.detach()} | options
    assert torch.equal(generate(wide, drafter, None, **broken), generate(wide, None, None, **broken))
    assert not drafter.scores.isnan().any()
    assert torch.equal(generate(wide, drafter, ids, **options), generate(wide, None, ids, **options))
    assert drafter.stats.acceptance_length > 2


def test_nothing_is_proposed_before_a_token_has_been_seen(wide, rounds):
    drafter = hf_domino.recycling(wide).double()
    ids, options = calls(1)
    assert torch.equal(generate(wide, drafter, ids, **options), generate(wide, None, ids, **options))
    stats = drafter.stats
    assert stats.proposed[0][0] == 0, "the table is empty in the first round"
    assert max(stats.proposed[0]) <= 32


def test_sizes_of_trees_are_chosen_up_to_the_wanted_one(wide):
    ids, options = calls(1)
    drafter = hf_domino.recycling(wide, draft_tree_size=8).double()
    for _ in range(3):
        generate(wide, drafter, ids, **options)
    assert 0 < max(drafter.stats.proposed[0]) <= 8


@pytest.fixture
def clocked(wide, monkeypatch):
    """A target that no call has tried with trees yet, and how wide its forwards were; those of a trial count as 0.

    The clock advances by what a forward costs: a second, and a little for each position beside the first.
    """
    target = copy.deepcopy(wide)
    widths, seconds, trial = [], [0.0], []

    def count(module, args, kwargs, outputs):
        width = kwargs["input_ids"].shape[1]
        seconds[0] += 1 + NOMINAL_PROPOSAL * (width - 1)
        if kwargs.get("use_cache") is False:  # generation has a cache, so this is the first of a trial's forwards
            trial[:] = [0, 0, 0]
        widths.append(trial.pop() if trial else width)

    target.register_forward_hook(count, with_kwargs=True)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return target, widths


@pytest.mark.parametrize("num_tokens", [5, 10, 20])
def test_a_first_answer_costs_hardly_more_than_plain_generation(clocked, num_tokens):
    target, widths = clocked
    cost = 0.0
    for start in range(5, 60, 7):
        widths.clear()
        generate(
            target,
            hf_domino.recycling(target).double(),
            torch.arange(start, start + 4)[None],
            max_new_tokens=num_tokens,
        )
        cost += sum(1 + NOMINAL_PROPOSAL * (width - 1) for width in widths[1:] if width)  # the first is the prompt's
    assert cost <= 1.03 * 8 * (num_tokens - 1)


def test_the_target_is_tried_with_a_tree_when_the_first_one_is_due(clocked, monkeypatch):
    target, widths = clocked
    propose, due = RecyclingSession.propose, []

    def record(self, *args, **kwargs):
        tree = propose(self, *args, **kwargs)
        if tree.parents is not None:
            due.append((len(widths), tree.num_nodes))
        return tree

    monkeypatch.setattr(RecyclingSession, "propose", record)
    drafter = hf_domino.recycling(target).double()
    while not due:
        generate(target, drafter, PROMPTS[0][None])
    first, num_nodes = due[0]
    assert widths.index(0) == first > 1
    assert num_nodes <= 4
    assert widths.count(0) == 3

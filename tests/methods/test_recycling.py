"""Token recycling (arXiv 2408.08696): the table and the trees, written out beside the package."""

from __future__ import annotations

import contextlib
import copy
import time

import pytest
import torch
from calls_of_methods import PROMPTS, SAMPLED, TEMPERATURE, calls, generate, noise_of

import hf_domino
from hf_domino.decoding.estimates import NOMINAL_PROPOSAL
from hf_domino.decoding.recycling import RecyclingSession

SUCCESSORS = 8
KINDS = {"trees": {"draft_tree_size": 24}, "chains": {"draft_tree_size": None}}


@pytest.fixture
def drafter(wide):
    return hf_domino.recycling(wide, draft_length="full").double()


@contextlib.contextmanager
def seen_by(target):
    """Scores of each token's successors, from what goes through the target behind its first forward."""
    table, forwards = {}, []

    def watch(module, args, kwargs, outputs):
        forwards.append(kwargs["input_ids"])
        if len(forwards) > 1:  # the first is the prompt's
            read(table, kwargs["input_ids"], outputs.logits)

    handle = target.register_forward_hook(watch, with_kwargs=True)
    yield table
    handle.remove()


def read(table, input_ids, logits):
    found = {}
    for token, row in zip(input_ids.flatten().tolist(), logits.flatten(0, 1).tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda each: -row[each])
        found.setdefault(token, {each: row[each] for each in order[:SUCCESSORS]})
    table.update(found)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_plain_and_the_table_holds_what_the_target_gave_last(wide, drafter, kind, batch_size, do_sample):
    drafter, (ids, options) = drafter.view(**KINDS[kind]), calls(batch_size)
    options |= SAMPLED if do_sample else {}
    plain = generate(wide, None, ids, **options)
    with seen_by(wide) as table:
        assert torch.equal(generate(wide, drafter, ids, **options), plain)
    assert max(length for row in drafter.stats.rows for length in row) > 1
    assert len(table) > 10
    for token in range(wide.config.vocab_size):
        successors, scores = drafter.successors[token].tolist(), drafter.scores[token]
        assert scores.isneginf().all() if token not in table else successors == list(table[token])
        if token in table:
            torch.testing.assert_close(scores, torch.tensor(list(table[token].values())).double())
    first = sum(len(row) for row in drafter.stats.rows)
    assert torch.equal(generate(wide, drafter, ids, **options), plain)
    if not do_sample and batch_size == 1:  # what one call has seen serves the next
        assert sum(len(row) for row in drafter.stats.rows) < first


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_tree_is_the_likeliest_paths_of_the_table(wide, drafter, monkeypatch, rounds, do_sample):
    tables, branches = [], RecyclingSession._branches_of

    def keep(self, *args, **kwargs):
        tables.append((drafter.successors.clone(), drafter.scores.clone()))
        return branches(self, *args, **kwargs)

    monkeypatch.setattr(RecyclingSession, "_branches_of", keep)
    trees, (ids, options) = drafter.view(draft_tree_size=5, block_size=3), calls(1)
    generate(wide, trees, ids, **options, **(SAMPLED if do_sample else {}))
    assert trees.stats.chain is None
    noise, num_compared = noise_of(1, wide.config.vocab_size), 0
    for (_, text, paths, alpha), (successors, scores) in zip(rounds, tables, strict=True):
        if not paths:  # no successor has been seen
            continue
        step = len(text) - len(PROMPTS[0])
        divisor, found = TEMPERATURE if do_sample else 1.0, {}
        for path, chance in paths.items():
            expected = 1.0
            for depth, (before, token) in enumerate(zip((text[-1], *path), path, strict=False)):
                sampled = alpha * scores[before] / divisor
                if do_sample:
                    sampled = sampled - noise[step + depth, 0, successors[before]].log()
                place = successors[before].tolist().index(token)
                expected *= float(sampled.softmax(dim=-1).nan_to_num(0.0)[place])
            found[path] = expected
            assert chance == pytest.approx(expected, rel=1e-5)
            num_compared += expected > 0
        # None of the first depth that was left out is likelier than the least of the tree.
        sampled = alpha * scores[text[-1]] / divisor
        sampled = sampled - noise[step, 0, successors[text[-1]]].log() if do_sample else sampled
        left_out = [
            chance
            for token, chance in zip(successors[text[-1]].tolist(), sampled.softmax(dim=-1).tolist(), strict=True)
            if (token,) not in paths
        ]
        if len(paths) == 5:
            assert max(left_out) <= min(found.values()) + 1e-9
    assert num_compared > 20


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

"""Token recycling in rounds of fixed shape: the text is plain, launched one by one and played from recordings alike."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
from calls_of_methods import PROMPTS, SAMPLED, calls, generate
from recorded_graphs import note_transfers, recorded_graphs

import hf_domino
from hf_domino.decoding.policy import policy_for
from hf_domino.decoding.round import Outcome

STATIC = {"cache_implementation": "static"}
STAGES = {"grow_tree", "target_forward", "accept", "take", "put", "learn_block", "keep"}
OF_TREE, OF_STEP = 5, 4  # stages that each size of trees has, beside `take` and `put`; and those of a plain decode step
recycling = importlib.import_module("hf_domino.methods.recycling")  # the package has a function of this name


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    """Few rows for pairs, so that some pairs replace others."""
    monkeypatch.setattr(recycling, "NUM_PAIRS", 1009)


@pytest.fixture
def recorded():
    """The graphs of each workspace that a test makes, whose stages are recorded once and played from then on."""
    with recorded_graphs() as made:
        yield made


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize(
    "options",
    [{}, SAMPLED, SAMPLED | {"repetition_penalty": 1.3, "min_new_tokens": 4}, {"prompt_lookup_num_tokens": 4}],
    ids=["greedy", "sampled", "penalty", "lookup"],
)
@pytest.mark.parametrize("draft_length", ["full", "adaptive"])
def test_recorded_rounds_write_plain_text(wide, recorded, batch_size, options, draft_length):
    drafter = hf_domino.recycling(wide, draft_length=draft_length).double()
    ids, more = calls(batch_size)
    alone = {name: value for name, value in options.items() if name != "prompt_lookup_num_tokens"}
    plain = generate(wide, None, ids, **more, **alone)
    for _ in range(2):
        assert torch.equal(generate(wide, drafter, ids, **more, **options, **STATIC), plain)
    assert recorded[0].names >= STAGES
    assert len(recorded) == 1
    assert drafter.stats.chain is None
    if draft_length == "full":  # otherwise, it depends on the time that rounds take
        assert max(length for row in drafter.stats.rows for length in row) > 1


def test_ends_inside_a_branch(wide, recorded):
    drafter = hf_domino.recycling(wide, draft_length="full").double()
    ids, options = calls(3)
    plain = generate(wide, None, ids, **options)
    for place in (20, 26, 33):
        ends = plain[:2, place].tolist()
        expected = generate(wide, None, ids, eos_token_id=ends, **options)
        assert torch.equal(generate(wide, drafter, ids, eos_token_id=ends, **options, **STATIC), expected)


@pytest.mark.parametrize("draft_tree_size", [16, 32, None])
def test_each_stage_is_captured_once(wide, recorded, draft_tree_size):
    drafter = hf_domino.recycling(wide, draft_length="full", draft_tree_size=draft_tree_size).double()
    for prompt in PROMPTS:
        expected = generate(wide, None, prompt[None])
        assert torch.equal(generate(wide, drafter, prompt[None], **STATIC), expected)
    expected = STAGES if draft_tree_size else STAGES - {"grow_tree", "take", "put"} | {"choose_chain"}
    assert [(made.names, made.num_captured) for made in recorded] == [(expected, len(expected) + OF_STEP)]
    if draft_tree_size:
        assert {draft_tree_size} <= set(drafter.stats.proposed[0]) <= {0, draft_tree_size}


def test_sizes_of_trees_are_captured_as_they_are_chosen(wide, recorded, forward_clock):
    drafter, sizes = hf_domino.recycling(wide).double(), set()
    for prompt in PROMPTS * 3:
        generate(wide, drafter, prompt[None], max_new_tokens=60, **STATIC)
        sizes |= set(drafter.stats.proposed[0])
    assert {0, 4} < sizes <= {0, 4, 8, 16, 32}
    assert recorded[0].num_captured == OF_STEP + OF_TREE * len(sizes - {0}) + 2


def test_a_capture_leaves_the_table_as_a_launch_does(wide):
    """A capture runs a stage more than once."""
    tables, (ids, options) = [], calls(3)
    for stages in (contextlib.nullcontext, recorded_graphs):
        drafter = hf_domino.recycling(wide, draft_length="full", draft_tree_size=12).double()
        with stages():
            for _ in range(2):
                generate(wide, drafter, ids, **options, **STATIC)
        tables.append(drafter.state_dict())
        hf_domino.release_workspaces()
    assert (tables[0]["scores"] > -torch.inf).any()
    for name, values in tables[0].items():
        assert torch.equal(values, tables[1][name]), name


def test_the_host_reads_once_a_round(wide, recorded, monkeypatch):
    """And sends nothing: on a GPU both would wait for the device."""
    drafter = hf_domino.recycling(wide, draft_length="full", draft_tree_size=16).double()
    options = {"max_new_tokens": 60, "assistant_model": drafter, "do_sample": False, "pad_token_id": 2} | STATIC
    prompt = PROMPTS[0][None]
    wide.generate(prompt, **options)  # makes the recordings
    reads = note_transfers(monkeypatch)
    counts = []
    for new_tokens in (20, 60):
        drafter.forget()
        reads.clear()
        wide.generate(prompt, **options | {"max_new_tokens": new_tokens})
        counts.append((len(reads), drafter.stats.num_rounds))
    # What a call reads and sends besides cancels between a short and a long text of the same buffers.
    assert counts[1][0] - counts[0][0] == counts[1][1] - counts[0][1] > 5


def test_nothing_is_drafted_after_a_token_that_was_never_seen(wide, recorded, rounds):
    drafter, prompt = hf_domino.recycling(wide, draft_length="full").double(), PROMPTS[0][None]
    assert torch.equal(generate(wide, drafter, prompt, **STATIC), generate(wide, None, prompt))
    proposed = drafter.stats.proposed[0]
    assert set(proposed) == {0, 32}
    assert proposed[0] == 0
    assert len(rounds) == len(proposed) - proposed.count(0)
    for _, text, _, _ in rounds:
        assert text[-1] in text[len(PROMPTS[0]) : -1]
    generate(wide, drafter, prompt, **STATIC)  # which knows what the table holds
    assert drafter.stats.proposed[0][0] == 32


def test_a_forgotten_table_is_that_of_a_new_drafter(wide):
    drafter = hf_domino.recycling(wide)
    expected = {name: values.clone() for name, values in drafter.state_dict().items()}
    generate(wide, drafter, PROMPTS[0][None])
    assert not torch.equal(drafter.scores, expected["scores"])
    drafter.forget()
    for name, values in drafter.state_dict().items():
        assert torch.equal(values, expected[name]), name


@pytest.mark.parametrize(("is_fixed", "expected"), [(True, {16, 32}), (False, {32})])
def test_few_sizes_of_trees_are_captured_on_a_gpu(wide, is_fixed, expected):
    drafter, sizes = hf_domino.recycling(wide).to("meta"), set()
    policy = policy_for(drafter, drafter, wide, 8, do_sample=False, is_fixed=is_fixed)
    for _ in range(60):
        plan = policy.plan(1, 8, None, lambda: True)
        size = plan.arm.tree_size
        sizes |= {size} - {None}
        policy.observe(Outcome(plan, [0], size or 0, [4 if size else 1]), 1.0 + 0.01 * (size or 0))
    assert sizes == expected

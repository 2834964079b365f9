"""Rounds on simulated machines: drafting that loses costs little, drafting that pays is hardly disturbed."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import threading
import time

import pytest
import torch
from builders import build_drafter
from oracle import oracle, tree_faults

from hf_domino.decoding import candidate_generator
from hf_domino.decoding.policy import ADAPTIVE_SIZE, Policy, policy_for
from hf_domino.decoding.prompt_lookup import Offer, PromptLookup
from hf_domino.decoding.round import Outcome, Plan
from hf_domino.stats.decoding_stats import DecodingStats

MOST, SEEDS = 8, range(7)
FLAT, RISING = (1.4, 0.0), (1.6, 0.05)
"""Cost of a round in plain decode steps, and of one proposal more."""


def played(policy, accepted, seconds, num_rows=1, may_branch=bool, offer=None):
    """One round: its plan, and the tokens it brought."""
    plan = policy.plan(num_rows, MOST, offer, may_branch)
    count = min(accepted, plan.length)
    num_proposed = plan.arm.tree_size or plan.length
    policy.observe(Outcome(plan, range(num_rows), num_proposed, [count + 1] * num_rows), seconds(plan))
    return plan, count + 1


def costs(first, slope):
    """Seconds of a plan on a machine whose single step takes one."""
    return lambda plan: first + slope * (plan.arm.tree_size or plan.length) if plan.length else 1.0


def run(policy, rate, cost, clock=float, num_tokens=128, seed=0, plans=None):
    """Expected tokens in the time of a single step, over a text whose proposals are accepted at this rate."""
    draws = random.Random(seed)
    is_right = [draws.random() < rate for _ in range(num_tokens + MOST)]
    position, expected, seconds = 0, 0.0, 0.0
    while position < num_tokens:
        accepted = next(count for count, right in enumerate([*is_right[position:], False]) if not right)
        plan, brought = played(policy, accepted, lambda plan: clock(cost(plan)))
        position, seconds = position + brought, seconds + cost(plan)
        expected += sum(rate**count for count in range(plan.length + 1))
        if plans is not None:
            plans.append(plan)
    return expected / seconds


class Whole:
    """Always drafts whole blocks."""

    def plan(self, *_):
        return Policy(MOST, is_full=True).plan(1, MOST)

    def observe(self, *_):
        pass


def noisy(draws):
    """Every time is off by some, and one of twenty by factors."""
    return lambda seconds: (
        seconds * math.exp(draws.gauss(0, 0.15)) * (draws.choice([2, 3, 5]) if draws.random() < 0.05 else 1)
    )


def spiky(draws):
    return lambda seconds: seconds * (draws.choice([3, 5, 10]) if draws.random() < 0.15 else 1)


def drifting(draws):
    levels = [0.0]

    def clock(seconds):
        levels.append(min(max(levels[-1] + draws.gauss(0, 0.12), -0.2), 1.8))
        return seconds * math.exp(levels[-1])

    return clock


def of_two_speeds(draws):
    factors = [1, 3]

    def clock(seconds):
        if draws.random() < 0.08:
            factors.reverse()
        return seconds * factors[0]

    return clock


def heavy_tailed(draws):
    return lambda seconds: seconds * (math.exp(abs(draws.gauss(0, 0.5))) + 0.3 * (draws.paretovariate(1.2) - 1))


def preempted(draws):
    """Others take a slice now and then, the likelier the longer something runs."""

    def clock(seconds):
        left, total = seconds, seconds
        while (left := left - draws.expovariate(1.25)) > 0:
            total += draws.choice([0.3, 0.4, 0.8, 1.2])
        return total

    return clock


@pytest.mark.parametrize("curve", [FLAT, RISING])
def test_a_hopeless_drafter_costs_little(curve):
    policy, cost = Policy(MOST), costs(*curve)
    assert run(policy, 0.0, cost) >= 0.97
    later = []
    for _ in range(12):
        policy.begin_call()
        later.append(run(policy, 0.0, cost))
    assert statistics.harmonic_mean(later) >= 0.99


def test_a_round_of_four_steps_is_given_up_at_once():
    policy, cost = Policy(MOST), costs(4.0, 0.0)
    assert run(policy, 0.0, cost) >= 0.92
    assert run(policy, 0.0, cost, num_tokens=1000) >= 0.98
    assert run(Policy(MOST), 0.6, cost, num_tokens=500) >= 0.95  # which whole blocks make 0.61


@pytest.mark.parametrize("curve", [FLAT, RISING])
@pytest.mark.parametrize("make_clock", [noisy, lambda draws: float], ids=["noisy", "calm"])
def test_a_good_drafter_is_hardly_disturbed_in_its_first_text(curve, make_clock):
    cost = costs(*curve)
    whole = run(Whole(), 0.8, cost)
    assert whole > 2
    found = [run(Policy(MOST), 0.8, cost, make_clock(random.Random(seed)), seed=seed) for seed in SEEDS]
    assert min(found) >= 0.97 * whole


def test_a_step_that_took_long_once_does_not_decide_for_the_text():
    """A machine on which whole blocks bring 0.70; a first time of a single step was too long by a factor of three."""
    cost = costs(1 + 3.6 * 0.3, 3.6 * 0.7 / MOST)
    speeds = [run(Policy(MOST), 0.7, cost, noisy(random.Random(seed)), seed=seed) for seed in range(12)]
    assert min(speeds) > 0.8
    assert statistics.fmean(speeds) > 0.92
    policy, later = Policy(MOST), []
    for seed in range(8):
        policy.begin_call()
        later.append(run(policy, 0.7, cost, noisy(random.Random(seed)), seed=seed))
    assert statistics.fmean(later[1:]) > 0.94


@pytest.mark.parametrize("make_clock", [spiky, drifting, of_two_speeds, heavy_tailed, preempted])
def test_clocks_that_lie(make_clock):
    """The machine does other work, too: a good drafter goes on, and a bad one costs little."""
    cost, whole = costs(*RISING), run(Whole(), 0.8, costs(*RISING))
    good = [run(Policy(MOST), 0.8, cost, make_clock(random.Random(seed)), 256, seed) for seed in SEEDS]
    bad = [run(Policy(MOST), 0.0, cost, make_clock(random.Random(seed)), 256, seed) for seed in SEEDS]
    middling = [run(Policy(MOST), 0.35, cost, make_clock(random.Random(seed)), 256, seed) for seed in SEEDS]
    assert min(good) > 0.75 * whole
    assert statistics.fmean(good) > 0.9 * whole
    assert min(bad) > 0.9
    assert statistics.fmean(bad) > 0.955
    assert statistics.fmean(middling) > 0.92


@pytest.mark.parametrize(("rate", "expected"), [(0.2, 0.97), (0.35, 0.97), (0.5, 1.0), (0.65, 1.35), (0.9, 3.0)])
def test_what_pays_is_found(rate, expected):
    """A machine on which whole blocks bring 0.77, 1.00, 1.40 and 3.06, and chains of four 0.85, 1.08, 1.40 and 2.28."""
    speeds = [run(Policy(MOST), rate, costs(*RISING), noisy(random.Random(seed)), 1000, seed) for seed in SEEDS]
    assert statistics.median(speeds) > expected


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.5), (2.5, 1.0)])
def test_a_machine_that_changes_its_pace_is_not_the_drafters_fault(before, after):
    policy, plans, now = Policy(MOST), [], itertools.count()
    clock = lambda seconds: seconds * (before if next(now) < 150 else after)  # noqa: E731
    run(policy, 0.8, costs(*RISING), clock, 1500, plans=plans)
    assert sum(plan.length == 0 for plan in plans) < 20


def test_a_cost_that_jumps_is_not_taken_for_the_machines_pace():
    policy, plans, draws = Policy(MOST), [], random.Random(0)
    for index in range(500):
        first = 1.6 if index < 200 else 4.0
        accepted = next((count for count in range(MOST) if draws.random() > 0.75), MOST)
        plans.append(played(policy, accepted, costs(first, 0.05))[0])
    assert sum(plan.length > 0 for plan in plans[50:200]) > 140
    assert sum(plan.length > 0 for plan in plans[290:]) < 30


@pytest.mark.parametrize("is_new_call", [True, False])
def test_drafting_comes_back_when_the_text_gets_easy(is_new_call):
    policy = Policy(MOST)
    plans = [played(policy, 0, costs(*FLAT))[0] for _ in range(100)]
    assert sum(plan.length > 0 for plan in plans) < 16
    if is_new_call:
        policy.begin_call()
    plans = [played(policy, MOST, costs(*FLAT))[0] for _ in range(200)]
    first = next(index for index, plan in enumerate(plans) if plan.length)
    assert first <= 100  # the time of a trial that brings nothing is to be less than a hundredth
    assert sum(plan.length == MOST for plan in plans[first + 10 :]) > 0.9 * len(plans[first + 10 :])


def test_a_clock_that_stands_still():
    policy = Policy(MOST)
    assert {played(policy, index % 2, lambda plan: 0.0)[0].length for index in range(60)} <= {0, 2, 4, MOST}


def test_pauses_tell_what_was_measured():
    policy = Policy(MOST)
    pauses = [plan.pause for plan, _ in (played(policy, 0, costs(*RISING)) for _ in range(40)) if plan.pause]
    assert pauses
    for pause in pauses:
        assert 1 <= pause.tokens < pause.cost < 2.5
        assert pause.num_readings > 0


def test_a_pause_that_outlasts_a_call_is_counted_in_each_call():
    policy, calls = Policy(MOST), []
    for num_rounds in (20, 6):
        policy.begin_call()
        calls.append(DecodingStats(MOST, [[]], [[]], looked_up=[[]]))
        for _ in range(num_rounds):
            plan = policy.plan(1, MOST)
            outcome = Outcome(plan, [0], plan.length, [1])
            outcome.add_to(calls[-1])
            policy.observe(outcome, costs(*RISING)(plan))
    assert all(stats.num_paused == sum(pause.num_steps for pause in stats.pauses) > 0 for stats in calls)
    assert calls[1].pauses[0].first_round <= 3  # it is tried first


def test_a_pause_ends_with_its_call():
    policy, calls = Policy(MOST), []
    for _ in range(3):
        policy.begin_call()
        calls.append([played(policy, 0, costs(6.0, 0.0))[0].pause for _ in range(40)])
    assert calls[1][-1] is not None
    assert calls[2][0] is not None  # the next call begins in a pause, which is one of its own
    assert calls[2][0] is not calls[1][-1]


@pytest.mark.parametrize("curve", [FLAT, RISING])
def test_a_text_that_pays_is_drafted_whatever_came_before(curve):
    found = []
    for seed in SEEDS:
        policy, clock = Policy(MOST), noisy(random.Random(seed))
        for rate, count in ((0.02, 3), (0.85, 1)):
            for text in range(count):
                policy.begin_call()
                brought = run(policy, rate, costs(*curve), clock, seed=10 * seed + text)
        found.append(brought / run(Whole(), 0.85, costs(*curve), seed=10 * seed))
    assert statistics.median(found) >= 0.95
    assert statistics.fmean(found) >= 0.85  # one trial of eight brings nothing


def test_whole_blocks_are_all_that_full_drafts():
    policy = Policy(MOST, is_full=True)
    plans = [played(policy, 0, costs(4.0, 0.0))[0] for _ in range(100)]
    assert {(plan.length, plan.is_comparison, plan.pause) for plan in plans} == {(MOST, False, None)}
    assert policy.plan(1, 3).length == 3  # where there is no more room
    trees = Policy(MOST, 12, is_full=True)
    assert {trees.plan(1, MOST, None, lambda may=may: may).arm.tree_size for may in (True, False)} == {12, None}


@pytest.mark.parametrize(("seconds_of_tree", "accepted", "wins"), [(1.7, 4, True), (3.2, 4, False), (2.0, 2, False)])
def test_trees_are_played_where_they_bring_more(seconds_of_tree, accepted, wins):
    """Beside chains of which two are accepted, in two plain decode steps."""
    policy, sizes = Policy(MOST, "adaptive"), []
    for _ in range(600):
        plan = policy.plan(1, MOST, None, lambda: True)
        count = min(accepted if plan.arm.tree_size else 2, plan.length)
        seconds = (seconds_of_tree if plan.arm.tree_size else 2.0) if plan.length else 1.0
        policy.observe(Outcome(plan, [0], plan.arm.tree_size or plan.length, [count + 1]), seconds)
        sizes.append(plan.arm.tree_size)
    assert (statistics.mode(sizes[-200:]) is not None) == wins


# Tokens that a round of token recycling emits by the size of its trees, and its time in plain decode steps, measured
# on CPUs: of SmolLM2 with packed weights and without, and of Qwen2.5-Coder-0.5B with packed ones.
RECYCLED = {4: 1.44, 8: 1.52, 16: 1.71, 32: 1.94}
SECONDS_OF_TREES = [
    {4: 1.12, 8: 1.18, 16: 1.34, 32: 1.57},
    {4: 2.02, 8: 2.03, 16: 2.24, 32: 2.38},
    {4: 1.01, 8: 1.05, 16: 1.36, 32: 2.27},
]


@pytest.mark.parametrize("seconds", SECONDS_OF_TREES)
def test_the_size_of_trees_follows_their_cost(seconds):
    best = max(1.0, *(RECYCLED[size] / seconds[size] for size in RECYCLED))
    speeds = []
    for seed in SEEDS:
        draws, policy = random.Random(seed), Policy(MOST, 32, (4, 8, 16))
        clock, tokens, taken = noisy(draws), 0.0, 0.0
        for _ in range(5):  # texts
            policy.begin_call()
            for _ in range(60):
                plan = policy.plan(1, MOST, None, lambda: True)
                size = plan.arm.tree_size
                cost = seconds[size] if size else 1.0
                rate = 1 - 1 / RECYCLED[size] if size else 0.0
                accepted = next((count for count in range(MOST) if draws.random() > rate), MOST)
                policy.observe(Outcome(plan, [0], size or 0, [accepted + 1]), clock(cost))
                tokens += RECYCLED[size] if size else 1.0
                taken += cost
        speeds.append(tokens / taken)
    assert statistics.fmean(speeds) > 0.92 * best
    assert min(speeds) > 0.85 * best


def test_a_round_without_proposals_is_a_plain_decode_step():
    policy, plans = Policy(MOST, 32, (4, 8, 16)), []
    for _ in range(50):
        plan = policy.plan(1, MOST, None, lambda: True).followed_with(0)
        policy.observe(Outcome(plan, [0], 0, [1]), 1.1)
        plans.append(plan)
    assert {plan.arm.length for plan in plans} == {0}
    assert policy.plan(1, MOST, None, lambda: True).arm.tree_size  # nothing was held against drafting


def offer_of(length, expected):
    return Offer([[5] * length], [[3] * length], expected)


def test_copies_are_played_where_they_promise_more_tokens_in_their_time():
    hopeless, good = Policy(MOST), Policy(MOST)
    for _ in range(60):
        played(hopeless, 0, costs(*RISING))
        played(good, 6, costs(*RISING))
    for policy, expected, is_lookup in ((hopeless, 1.05, False), (hopeless, 3.0, True), (good, 3.0, False)):
        offer = offer_of(4, expected)
        plans = [policy.plan(1, MOST, offer) for _ in range(3)]
        assert any(plan.offer is offer for plan in plans) == is_lookup
    assert good.plan(1, MOST, offer_of(10, 9.0)).offer is not None


def test_copies_cost_what_they_are_measured_to_cost():
    policy = Policy(MOST)
    for _ in range(60):
        played(policy, 1, lambda plan: 4.0 if plan.length else 1.0, offer=offer_of(4, 2.5))
    assert policy.plan(1, MOST, offer_of(4, 2.5)).offer is None


def test_knowledge_is_kept_between_calls_that_choose_alike(tiny_qwen3, tiny_drafter):
    tiny_drafter.config.draft_length = "adaptive"

    def policy_of_a_call(*settings, call=None, **options):
        return policy_for(call or Call(), tiny_drafter, tiny_qwen3, *settings, **options)

    policy = policy_of_a_call(5, False)
    assert policy_of_a_call(5, False) is policy
    assert policy_of_a_call(3, False) is not policy  # shorter blocks cost less
    assert policy_of_a_call(5, False, is_fixed=True) is not policy
    sampling = policy_of_a_call(5, True)
    assert policy_of_a_call(5, True) is sampling is not policy
    running = Call()
    assert policy_of_a_call(5, False, call=running) is policy
    assert policy_of_a_call(5, False) is not policy  # the first call has not ended
    del running
    assert policy_of_a_call(5, False) is policy


class Call:
    """Stands for the loop of a call, which uses a policy as long as it exists."""


def rounds_of_calls(target, drafter, in_thread):
    """What the rounds of three calls propose, each in a thread of its own or all in this one."""
    rounds = []

    def generate():
        with torch.random.fork_rng():
            target.generate(torch.arange(5, 12)[None], assistant_model=drafter, do_sample=False, max_new_tokens=40)
        rounds.append(drafter.stats.proposed[0])

    for _ in range(3):
        if in_thread:
            thread = threading.Thread(target=generate)
            thread.start()
            thread.join()
        else:
            generate()
    return rounds


def test_a_thread_for_each_call_learns_as_one_thread_does(target, make_drafter, forward_clock):
    """As programs stream, with `TextIteratorStreamer`: what a call has learnt of a drafter is not lost."""
    fields = {"draft_length": "adaptive", "draft_tree_size": None}
    together = rounds_of_calls(target, make_drafter(target, **fields), in_thread=False)
    assert together[0] != together[2]  # which goes by what was learnt
    assert rounds_of_calls(target, make_drafter(target, **fields), in_thread=True) == together


def test_a_call_that_fails_gives_back_what_was_learnt(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3, draft_length="adaptive")
    first = policy_for(Call(), drafter, tiny_qwen3, drafter.config.num_draft_tokens, False)

    def fail(*args):
        raise ValueError

    options = {"assistant_model": drafter, "do_sample": False, "max_new_tokens": 9}
    with pytest.raises(ValueError):
        tiny_qwen3.generate(torch.arange(5, 12)[None], prefix_allowed_tokens_fn=fail, **options)
    assert policy_for(Call(), drafter, tiny_qwen3, drafter.config.num_draft_tokens, False) is first


def test_trees_are_chosen_where_nothing_else_was_asked_for(tiny_qwen3, make_drafter):
    def sizes(is_fixed=False, may_branch=True, **fields):
        policy = policy_for(Call(), make_drafter(tiny_qwen3, **fields), tiny_qwen3, MOST, False, is_fixed)
        cost = lambda plan: 1.8 if plan.length else 1.0  # noqa: E731
        plans = [played(policy, 5, cost, may_branch=lambda: may_branch)[0] for _ in range(200)]
        return {plan.arm.tree_size for plan in plans if plan.length}

    assert sizes(draft_length="adaptive") == {None, ADAPTIVE_SIZE}
    assert sizes(draft_length="adaptive", draft_tree_size=9) == sizes(draft_length="full", draft_tree_size=9) == {9}
    for fields in (
        {"draft_length": "full"},
        {"is_fixed": True, "draft_length": "adaptive"},
        {"draft_tree_size": None, "draft_length": "adaptive"},
        {"may_branch": False, "draft_length": "adaptive", "draft_tree_size": 9},
    ):
        assert sizes(**fields) == {None}


class AllArms:
    """Plays every arm in turn, as a policy may."""

    def __init__(self, most, tree_size=None):
        policy = Policy(most, tree_size)
        self._arms = itertools.cycle([*policy._chains, *policy._trees])
        self._count = itertools.count(1)

    def price(self, num_rows):
        return 0.03

    def plan(self, num_rows, room, offer=None, may_branch=bool):
        if next(self._count) % 5 == 0:
            return Policy(0).plan(num_rows, 0)
        arm = next(self._arms)
        if arm.tree_size and not may_branch():
            arm = next(self._arms)
        return Plan(arm, min(arm.length, room))

    def observe(self, outcome, seconds):
        pass


@pytest.mark.parametrize(
    ("projector_type", "batch_size", "accuracy"),
    [("domino", 1, 0.95), ("domino", 3, 0.0), ("dflash", 3, 0.6)],
)
def test_output_is_the_targets_whatever_is_played(
    tiny_qwen3, make_drafter, projector_type, batch_size, accuracy, monkeypatch
):
    monkeypatch.setattr(candidate_generator, "policy_for", lambda *arguments: AllArms(6))
    drafter = make_drafter(tiny_qwen3, projector_type=projector_type)
    prompts = torch.randint(4, 64, (batch_size, 11))
    options = {"do_sample": False, "max_new_tokens": 60, "eos_token_id": -1}
    plain = tiny_qwen3.generate(prompts, **options)
    proposed = set()
    with oracle(tiny_qwen3, prompts, accuracy, plain):
        assert torch.equal(tiny_qwen3.generate(prompts, assistant_model=drafter, **options), plain)
        stats = drafter.stats
        for counts, lengths in zip(stats.proposed, stats.rows, strict=True):
            assert all(length <= count + 1 for count, length in zip(counts, lengths, strict=True))
            proposed |= set(counts)
    assert {0, 2, 4} < proposed
    assert stats.num_plain_steps == sum(counts.count(0) for counts in stats.proposed)


@pytest.mark.parametrize(("batch_size", "do_sample"), [(1, True), (3, False)])
def test_chains_and_trees_in_turn_do_not_change_the_text(tiny_qwen3, monkeypatch, batch_size, do_sample):
    monkeypatch.setattr(candidate_generator, "policy_for", lambda *arguments: AllArms(6, "adaptive"))
    prompts = torch.randint(4, 64, (batch_size, 11))
    options = {"do_sample": do_sample, "max_new_tokens": 60, "eos_token_id": -1}
    drafter = build_drafter(tiny_qwen3, draft_length="adaptive")
    torch.manual_seed(3)
    plain = tiny_qwen3.generate(prompts, **options)
    with tree_faults(plain.tolist(), tiny_qwen3.config.vocab_size, ADAPTIVE_SIZE):
        torch.manual_seed(3)
        assert torch.equal(tiny_qwen3.generate(prompts, assistant_model=drafter, **options), plain)
    assert (drafter.stats.tree_size, drafter.stats.chain) == (ADAPTIVE_SIZE, None)
    most = drafter.config.num_draft_tokens
    assert {count <= most for count in itertools.chain(*drafter.stats.proposed) if count} == {True, False}


def test_what_is_learnt_of_a_round_is_not_cut_where_the_text_ends(tiny_qwen3, make_drafter, monkeypatch):
    drafter, learnt = make_drafter(tiny_qwen3, draft_length="adaptive"), []
    monkeypatch.setattr(Policy, "observe", lambda self, outcome, *_: learnt.append(outcome.num_emitted))
    monkeypatch.setattr(PromptLookup, "observe", lambda self, offer, num_emitted: learnt.append(num_emitted))
    prompt, options = torch.randint(4, 64, (1, 11)), {"do_sample": False, "max_new_tokens": 2, "eos_token_id": -1}
    with oracle(tiny_qwen3, prompt, 1.0, **(options | {"max_new_tokens": 20})):
        tiny_qwen3.generate(prompt, assistant_model=drafter, **options)
    assert drafter.stats.rows == [[1]]
    assert learnt == [[drafter.stats.proposed[0][0] + 1]]
    assert learnt[0][0] > 2
    learnt.clear()
    options |= {"sequence_bias": [[[9], 1000.0]], "prompt_lookup_num_tokens": 5}
    tiny_qwen3.generate(torch.full((1, 40), 9), assistant_model=drafter, **options)
    assert drafter.stats.num_lookups == 1
    assert learnt == [[drafter.stats.proposed[0][0] + 1]] * 2
    assert learnt[0][0] > 2


@pytest.fixture
def width_clock(target, monkeypatch):
    """A clock that only the target's forwards advance: by a second for one position, and by more for each further one.

    The seconds of verifying a block include those of its draft. They are about those of SmolLM2-135M with packed
    weights on a CPU.
    """
    seconds = [0.0]

    def count(module, args, kwargs):
        width = kwargs["input_ids"].shape[1]
        seconds[0] += 1.25 + 0.05 * width if width > 1 else 1.0

    target.register_forward_pre_hook(count, with_kwargs=True)
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])


def first_text(target, drafter, accuracy):
    """How many times as fast as plain the first text of a drafter is, by the clock, and its statistics."""
    prompt = torch.arange(5, 12)[None]
    options = {"do_sample": False, "max_new_tokens": 128}
    start = time.perf_counter()
    plain = target.generate(prompt, **options)
    seconds = time.perf_counter() - start
    with oracle(target, prompt, accuracy, plain):
        assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
    return seconds / drafter.stats.seconds, drafter.stats


def test_the_first_text_of_an_untrained_drafter_loses_little(target, make_drafter, width_clock):
    drafter = make_drafter(target, draft_length="adaptive", block_size=8)
    speed, stats = first_text(target, drafter, 0.0)
    assert stats.tokens_per_forward < 1.1  # it is as bad as the test wants it
    assert speed > 0.97


def test_the_first_text_of_a_trained_drafter_gains_at_once(target, make_drafter, width_clock):
    drafter = make_drafter(target, draft_length="adaptive", draft_tree_size=None, block_size=8)
    speed, stats = first_text(target, drafter, 0.8)
    assert speed > 1.9
    assert stats.num_plain_steps < 6

from __future__ import annotations

import pytest

from hf_domino.planner import Costs, conclusions, make_plan, survival_from

COSTS = Costs(plain=0.010, draft=0.002, rollout=0.0005, verify=0.012)
SURVIVAL = survival_from([0.8] * 8)  # 8 proposals are best: 4.329 tokens in 18 ms, 2.40 x, and 25.3 ms to spare


def plan_with(survival=SURVIVAL, **costs):
    return make_plan(survival, Costs(**(vars(COSTS) | costs)))


def test_rounds_of_a_plan():
    plan = make_plan(SURVIVAL, COSTS)
    assert [entry.length for entry in plan.rounds] == list(range(9))
    plain, fourth = plan.rounds[0], plan.rounds[4]
    assert (plain.tokens, plain.seconds, plain.speed_up, plain.break_even) == (1, 0.010, 1, None)
    assert fourth.tokens == pytest.approx((1 - 0.8**5) / 0.2)
    assert fourth.seconds == pytest.approx(0.002 + 4 * 0.0005 + 0.012)
    assert fourth.tokens_per_second == pytest.approx(fourth.tokens / 0.016)
    assert fourth.speed_up == pytest.approx(fourth.tokens * 0.010 / 0.016)
    assert plan.best == max(plan.rounds, key=lambda entry: entry.speed_up)


def test_network_moves_the_best_length_and_the_sentence():
    local = make_plan(SURVIVAL, Costs(plain=10, rollout=1, verify=10))
    far = make_plan(SURVIVAL, Costs(plain=10, rollout=1, verify=10, round_trip=5))
    assert far.best_length > local.best_length
    assert far.side_by_side_speed_up == local.best.speed_up > far.best.speed_up > 1
    assert far.max_round_trip == local.max_round_trip


def test_a_gain_that_the_network_leaves():
    sentence = conclusions(plan_with(round_trip=0.010))[2]
    assert sentence == "Network: it leaves 1.55 x of 2.40 x on one machine; it pays for round trips of up to 25.3 ms."


def test_a_gain_that_the_network_eats():
    plan = plan_with(round_trip=0.030)
    best, _, network = conclusions(plan)
    assert plan.best_length == 0
    assert best.startswith("Best: plain decoding; the nearest is 8 proposals per round, 0.9")
    assert network.startswith("Network: it eats the gain; 2.40 x on one machine becomes 0.9")
    assert network.endswith("slower than plain decoding; it pays for round trips of up to 25.3 ms.")


def test_a_gain_that_sending_eats():
    plan = plan_with(transfer_per_proposal=0.020)
    assert plan.max_round_trip is None
    assert "no round trip is short enough, as sending" in conclusions(plan)[2]


def test_a_gain_that_never_was():
    plan = plan_with(survival=[0.1, 0.01], round_trip=0.001)
    best, even, network = conclusions(plan)
    assert best == "Best: plain decoding; the nearest is 1 proposal per round, 0.71 x."
    assert even.startswith("Break-even: with 2 proposals it pays from acceptance probability 0.")
    assert even.endswith("here it is 0.10.")
    assert network == "Network: nothing to lose; speculation does not pay on one machine either."


@pytest.mark.parametrize(
    ("verify", "said"), [(0.2, "none; even with everything"), (0.001, "with 4 proposals it pays whatever is accepted")]
)
def test_break_even_that_is_out_of_reach_or_always_there(verify, said):
    assert f"Break-even: {said}" in conclusions(plan_with(verify=verify))[1]


@pytest.mark.parametrize(
    ("survival", "message"),
    [
        ([], "must have at least one entry"),
        ([0.5, 1.5], r"must be in \[0, 1\], got 1.5 at 1"),
        ([0.5, 0.6], "must not rise with the position, got 0.6 at 1 after 0.5.*conditional.*--alpha"),
    ],
)
def test_contradictory_rates_are_refused(survival, message):
    with pytest.raises(ValueError, match=f"acceptance_rate_at {message}"):
        make_plan(survival, COSTS)

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


@pytest.mark.parametrize(
    ("costs", "place", "said"),
    [
        ({}, 0, "Best: 8 proposals per round, 2.40 x plain decoding."),
        ({"draft": 0.032}, 0, "Best: plain decoding; the nearest is 8 proposals per round, 0.9"),
        ({"survival": [0.1, 0.01]}, 1, "Break-even: with 2 proposals it pays from acceptance probability 0."),
        ({"verify": 0.2}, 1, "Break-even: none; even with everything accepted"),
        (
            {"verify": 0.001},
            1,
            "Break-even: with 4 proposals it pays from acceptance probability 0.00 on",
        ),
    ],
)
def test_what_follows_from_a_plan(costs, place, said):
    assert conclusions(plan_with(**costs))[place].startswith(said)


@pytest.mark.parametrize(
    ("survival", "message"),
    [
        ([], r"must be in \[0, 1\], one per proposal, got \[\]"),
        ([0.5, 1.5], r"must be in \[0, 1\], one per proposal, got \[0.5, 1.5\]"),
        ([0.5, 0.6], "must not rise with the position, got 0.6 at 1 after 0.5.*--alpha"),
    ],
)
def test_contradictory_rates_are_refused(survival, message):
    with pytest.raises(ValueError, match=f"acceptance_rate_at {message}"):
        make_plan(survival, COSTS)

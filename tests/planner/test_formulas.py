from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_domino.planner import Costs, alpha_for, expected_tokens, make_plan, survival_from

NUM_ROUNDS = 40_000
FIVE_SIGMA = 5 / NUM_ROUNDS**0.5  # of a mean over the rounds, in standard deviations of one

probabilities = st.floats(0, 1)
lengths = st.integers(1, 20)
times = st.floats(0, 10)
rates = st.lists(probabilities, min_size=1, max_size=20)
costs = st.builds(
    Costs,
    plain=st.floats(0.1, 10),
    verify=st.floats(0.1, 10),
    verify_slope=times,
    draft=times,
    rollout=times,
)


def simulate(conditional, seed=0):
    """Tokens of many rounds: proposals are accepted one after the other, and the target adds one token."""
    draws, tokens = random.Random(seed), []
    for _ in range(NUM_ROUNDS):
        accepted = 0
        while accepted < len(conditional) and draws.random() < conditional[accepted]:
            accepted += 1
        tokens.append(accepted + 1)
    return tokens


def test_speed_up_of_simulated_generation():
    conditional = [0.9, 0.8, 0.7, 0.6]
    cost = Costs(plain=10, verify=11, verify_slope=0.3, draft=2, rollout=0.5)
    clock, tokens = 0.0, simulate(conditional, seed=1)
    for _ in tokens:
        clock += 2 + 4 * 0.5 + (11 + 4 * 0.3)
    survival = survival_from(conditional)
    simulated = sum(tokens) * cost.plain / clock
    assert make_plan(survival, cost).rounds[4].speed_up == pytest.approx(simulated, rel=0.02)  # 5 sigma


@given(st.floats(0, 0.999), lengths)
def test_expected_tokens_in_closed_form(alpha, length):
    closed = (1 - alpha ** (length + 1)) / (1 - alpha)
    assert expected_tokens(survival_from([alpha] * length)) == pytest.approx(closed)


@given(probabilities, lengths)
def test_alpha_for_inverts_expected_tokens(alpha, length):
    tokens = expected_tokens(survival_from([alpha] * length))
    found = alpha_for(tokens, length)
    assert expected_tokens(survival_from([found] * length)) == pytest.approx(tokens, abs=1e-9)
    assert alpha_for(length + 1.1, length) is None


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_impossible_probabilities_are_refused(alpha):
    with pytest.raises(ValueError, match=rf"alpha must be in \[0, 1\], got {alpha} at position 1"):
        survival_from([0.5, alpha])


@given(rates, costs)
def test_best_length_is_the_fastest(conditional, cost):
    survival = survival_from(conditional)
    plan = make_plan(survival, cost)
    pace = [expected_tokens(survival[:length]) / cost.of_round(length) for length in range(len(survival) + 1)]
    assert pace[plan.best_length] == pytest.approx(max(pace))
    assert plan.best.speed_up >= 1  # plain decoding is among the lengths


@given(st.floats(0.01, 0.99), st.floats(0.01, 1), lengths)
def test_sequential_drafter_has_the_textbook_speed_up(alpha, share, length):
    survival = survival_from([alpha] * length)
    sequential = Costs(plain=7, rollout=share * 7, verify=7)
    tokens = (1 - alpha ** (length + 1)) / (1 - alpha)
    speed_up = make_plan(survival, sequential).rounds[-1].speed_up
    assert speed_up == pytest.approx(tokens / (1 + length * share))


@given(lengths, costs)
def test_break_even_gives_speed_up_one(length, cost):
    def round_at(alpha):
        return make_plan(survival_from([alpha] * length), cost).rounds[length]

    def speed_up(alpha):
        return round_at(alpha).speed_up

    alpha = round_at(0.5).break_even

    if alpha is None:
        assert speed_up(1.0) < 1 + 1e-9
    elif alpha == 0:
        assert speed_up(0.0) > 1 - 1e-9
    else:
        assert speed_up(alpha) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("field", "value"), [("plain", 0), ("verify", 0), ("draft", -1), ("verify_slope", math.inf), ("rollout", math.nan)]
)
def test_impossible_times_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a finite time"):
        Costs(**({"plain": 1, "verify": 1} | {field: value}))

"""A training of so many minutes: its plan follows what steps take here, and it ends in time."""

from __future__ import annotations

import json
import time

import pytest

from hf_domino.training.plan import ENOUGH_STEPS, LEAST_ANCHORS, plan_for

TIMES = {12: 0.7, 48: 1.6}  # 0.4 s and 0.025 s an anchor


@pytest.mark.parametrize(
    ("seconds", "num_anchors", "a_step"),
    [(60.0, LEAST_ANCHORS, 1.0), (ENOUGH_STEPS * 2.0, 64, 2.0), (10_000.0, 256, 6.8)],
    ids=["little time", "some", "much"],
)
def test_more_time_goes_into_steps_first_and_then_into_anchors(seconds, num_anchors, a_step):
    plan = plan_for(seconds, TIMES, 256)
    assert (plan.num_anchors, plan.seconds_per_step) == (num_anchors, pytest.approx(a_step))
    assert plan.num_steps == int(seconds / a_step)
    assert plan_for(seconds, TIMES, 8).num_anchors == 8  # where fewer are asked for


def test_anchors_that_cost_nothing_are_all_trained():
    assert plan_for(30.0, {12: 0.5, 48: 0.4}, 256).num_anchors == 256


@pytest.fixture
def timed(recipe):
    """A recipe whose length is that of its time."""
    for name in ("max_steps", "num_anchors", "num_train_epochs"):
        recipe.pop(name, None)
    return recipe | {"save_strategy": "no"}


def test_a_run_of_minutes_ends_in_time(timed, train, tmp_path, caplog, forward_clock):
    started = time.perf_counter()
    assert train(timed | {"eval_file": None, "minutes": 0.5}) == 0
    taken = time.perf_counter() - started
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert 0 < state["global_step"] == state["max_steps"] < 30
    assert 15 < taken <= 30  # a forward of the target takes a second
    assert "the plan for 0.5 minutes" in caplog.text
    assert "training on" in caplog.text
    assert "million parameters" in caplog.text


def test_a_machine_that_becomes_slower_ends_the_run(timed, train, tmp_path, caplog, forward_clock, monkeypatch):
    from hf_domino.training import plan

    monkeypatch.setattr(plan, "plan_for", lambda *_: plan.Plan(6, 1000, 0.01))
    assert train(timed | {"eval_file": None, "minutes": 0.5}) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] < 30
    assert "minutes are over after" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 0}, "minutes must be above 0, got 0"),
        ({"minutes": 1, "max_steps": 5}, "max_steps with minutes must be left out, got 5"),
        ({"minutes": 0.01}, "minutes must be enough for a step, got 0.01"),
    ],
)
def test_times_that_make_no_plan(change, message, timed, train, capsys, forward_clock):
    assert train(timed | {"eval_file": None} | change) == 2
    assert message in capsys.readouterr().err

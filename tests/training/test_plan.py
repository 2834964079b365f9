"""A training of so many minutes: its plan follows what steps take here, and it ends in time."""

from __future__ import annotations

import json
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_domino import DominoDraftModel
from hf_domino.training.muon import MuonWithAdamW
from hf_domino.training.plan import ENOUGH_STEPS, LEAST_ANCHORS, LEAST_ROWS, memory_of, plan_for

ONE_ROW = {"per_device_train_batch_size": 1}


def times(few=LEAST_ROWS):
    """Seconds of the timed steps, where 0.2 are a step's, 0.06 a row's and 0.005 an anchor's."""
    sizes = [(1, LEAST_ANCHORS), (few, LEAST_ANCHORS), (few, 3 * LEAST_ANCHORS)]
    return [0.2 + rows * (0.06 + 0.005 * anchors) for rows, anchors in sizes]


def sizes(plan):
    """Rows and anchors of a plan."""
    return plan["per_device_train_batch_size"], plan["num_anchors"]


@pytest.mark.parametrize(
    ("seconds", "num_rows", "num_anchors", "a_step"),
    [
        (60.0, LEAST_ROWS, LEAST_ANCHORS, 0.76),
        (ENOUGH_STEPS * 1.1, 6, 18, 1.1),
        (ENOUGH_STEPS * 2.01, 8, 33, 2.0),
        (10_000.0, 8, 256, 10.92),
    ],
    ids=["little time", "some", "more", "much"],
)
def test_more_time_goes_into_steps_first_then_into_rows_and_then_into_anchors(seconds, num_rows, num_anchors, a_step):
    plan = plan_for(seconds, times(), 8, 256)
    assert sizes(plan) == (num_rows, num_anchors)
    assert plan["max_steps"] == pytest.approx(seconds / a_step, abs=1)


@pytest.mark.parametrize("rows", [1, 2])
def test_no_more_rows_and_anchors_than_are_asked_for(rows):
    plan = plan_for(60.0, times(rows), rows, 8)
    assert sizes(plan) == (rows, 8)
    assert plan["max_steps"] == pytest.approx(60 / (0.2 + rows * 0.1), abs=1)


def test_rows_and_anchors_that_cost_nothing_are_all_trained():
    assert sizes(plan_for(30.0, [0.05, 0.04, 0.03], 8, 256)) == (8, 256)


@pytest.fixture
def timed(recipe):
    """A recipe of a new drafter whose length is that of its time, and whose shape is the usual one."""
    usual = ("max_steps", "num_anchors", "num_train_epochs", "block_size", "shift_label")
    return {name: value for name, value in recipe.items() if name not in usual} | {"save_strategy": "no"}


def test_a_run_of_minutes_ends_in_time_and_starts_from_the_target(timed, train, tmp_path, caplog, forward_clock):
    started = time.perf_counter()
    assert train(timed | {"eval_file": None, "minutes": 0.5}) == 0
    taken = time.perf_counter() - started
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert 0 < state["global_step"] == state["max_steps"] < 30
    assert 15 < taken <= 30  # a forward of the target takes a second
    assert "the plan for 0.5 minutes" in caplog.text
    assert "blocks of 8" in caplog.text
    assert "training on" in caplog.text
    assert "million parameters" in caplog.text
    drafter = DominoDraftModel.from_pretrained(tmp_path / "run")
    target = AutoModelForCausalLM.from_pretrained(timed["target"])
    pair = [model.layers[-1].mlp.down_proj.weight.flatten() for model in (drafter, target.model)]
    assert torch.cosine_similarity(*pair, dim=0) > 0.3  # of random weights it is nearly 0


def test_a_machine_that_becomes_slower_ends_the_run(timed, train, tmp_path, caplog, forward_clock, monkeypatch):
    from hf_domino.training import plan

    monkeypatch.setattr(plan, "plan_for", lambda *_: {"max_steps": ENOUGH_STEPS, "num_anchors": 6, **ONE_ROW})
    # This method cannot start from the target.
    assert train(timed | {"eval_file": None, "minutes": 0.5, "projector_type": "eagle3"}) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] < 30
    assert "minutes are over after" in caplog.text
    assert "blocks of 7" in caplog.text


def test_a_run_that_was_broken_off_goes_on_with_its_plan(timed, train, tmp_path, caplog, forward_clock):
    fields = timed | {"eval_file": None, "minutes": 0.4, "save_strategy": "steps", "save_steps": 2}
    assert train(fields) == 0
    state = tmp_path / "run" / "trainer_state.json"
    planned = json.loads(state.read_text())["max_steps"]
    state.unlink()  # as if it had been killed before its end
    assert train(fields) == 0
    assert "with the plan that it began with" in caplog.text
    assert json.loads(state.read_text())["global_step"] == planned


def test_a_run_without_minutes_cannot_go_on_with_a_plan(timed, train, capsys, forward_clock):
    few = timed | {"eval_file": None, "minutes": 0.4}
    steps = {"save_strategy": "steps", "save_steps": 2, "num_anchors": 4, "block_size": 8}
    other = {name: value for name, value in few.items() if name != "minutes"} | steps
    assert train(other | {"max_steps": 2}) == 0
    assert train(few | steps) == 2
    assert "must be left out, got 0.4. That run had no minutes: set max_steps" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 0}, "minutes must be above 0, got 0"),
        ({"minutes": 1, "max_steps": 5}, "max_steps with minutes must be left out, got 5"),
        ({"minutes": 0.01}, "minutes must be enough for a step, got 0.01"),
        ({"minutes": 1, "eval_strategy": "steps"}, "eval_strategy with minutes must be no, got 'steps'"),
    ],
)
def test_times_that_make_no_plan(change, message, timed, train, capsys, forward_clock):
    assert train(timed | {"eval_file": None} | change) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("uses_muon", [True, False])
@pytest.mark.parametrize("projector_type", ["domino", "dspark"])
def test_the_memory_that_is_announced_is_what_a_step_takes(uses_muon, projector_type, target, make_drafter):
    drafter = make_drafter(target, projector_type=projector_type)
    drafter.norm.requires_grad_(False)
    optimizer = torch.optim.AdamW(drafter.parameters())
    if uses_muon:
        optimizer = MuonWithAdamW(drafter, 0.02, 0.002, 0.0)
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    tensors = [*drafter.parameters(), *(parameter.grad for parameter in trained), *moments]
    assert memory_of(drafter, uses_muon) == sum(tensor.nbytes for tensor in tensors)

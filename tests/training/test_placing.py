"""Targets in places of their own: dispatched, offloaded, or quantised."""

from __future__ import annotations

import copy

import pytest
import transformers


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "eval_loss") if name in entry]


def test_a_target_in_other_places_trains_the_same(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    start = make_drafter(target)
    fields = {"max_steps": 2, "logging_steps": 1, "eval_strategy": "epoch"}
    rows = greedy_rows[:4], greedy_rows[:1]
    expected = losses(make_trainer(copy.deepcopy(start), *rows, **fields))
    target.save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.norm": "cpu"} | {f"model.layers.{index}": "disk" for index in (1, 2, 3)}
    placed = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=places)
    assert any(weight.is_meta for weight in placed.parameters())
    assert losses(make_trainer(start, *rows, **fields, target=placed)) == expected


def test_a_quantised_target_trains(target, make_drafter, make_trainer, greedy_rows, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    target.save_pretrained(tmp_path / "target")
    config = transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig())
    quantised = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target", quantization_config=config)
    assert "Int8" in type(quantised.model.layers[0].mlp.up_proj.weight).__name__
    trainer = make_trainer(make_drafter(target), greedy_rows[:2], max_steps=2, logging_steps=1, target=quantised)
    assert all(0 < loss < 20 for loss in losses(trainer))

"""A head over a frozen backbone, and drafters that are trained further: what is trained, gone on with and refused."""

from __future__ import annotations

import copy

import pytest
import torch

from hf_domino import DominoDraftModel


def of_head(name: str) -> bool:
    return name.split(".")[0] in ("prefix_gru", "embed_proj")


def test_a_head_over_a_frozen_backbone(target, make_drafter, make_trainer, greedy_rows):
    drafter = make_drafter(target)
    before = copy.deepcopy(drafter.state_dict())
    trainer = make_trainer(drafter, greedy_rows, train_only="head", max_steps=4, learning_rate=0.02)
    trainer.train()
    changed = {name for name, weight in drafter.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if of_head(name)}
    logged = [entry for entry in trainer.state.log_history if "lambda_base" in entry]
    assert {entry["lambda_base"] for entry in logged} == {0.0}


@pytest.fixture
def start(recipe, tmp_path, tiny_qwen3, make_drafter):
    """A recipe that starts from a DFlash drafter."""
    make_drafter(tiny_qwen3, projector_type="dflash", block_size=4).save_pretrained(tmp_path / "dflash")
    shape = ("num_hidden_layers", "block_size", "shift_label")
    return {name: value for name, value in recipe.items() if name not in shape} | {"drafter": str(tmp_path / "dflash")}


def test_a_dflash_drafter_is_given_a_head_by_the_command(start, train, tmp_path):
    head = {"projector_type": "domino", "gru_hidden_dim": 8, "emb_dim": 8, "pure_draft_prefix_len": 1}
    assert train(start | head | {"train_only": "head"}) == 0
    drafter, dflash = (DominoDraftModel.from_pretrained(tmp_path / name) for name in ("run", "dflash"))
    assert {name: getattr(drafter.config, name) for name in head} == head
    own = drafter.state_dict()
    for name, weight in dflash.state_dict().items():
        assert torch.equal(own.pop(name), weight)
    assert own
    assert all(of_head(name) and weight.any() for name, weight in own.items())


def test_a_drafter_goes_on_with_longer_blocks_and_convolutions(start, train, tmp_path, capsys):
    assert train(start | {"block_size": 6, "conv_kernel_size": 2, "learning_rate": 0.0}) == 0
    drafter, before = (DominoDraftModel.from_pretrained(tmp_path / name) for name in ("run", "dflash"))
    assert (drafter.config.block_size, before.config.block_size) == (6, 4)
    own = drafter.state_dict()
    for name, weight in before.state_dict().items():
        assert torch.equal(own.pop(name), weight)
    assert len(own) == 4 * len(drafter.layers)
    assert sum(bool(weight.any()) for weight in own.values()) == 2 * len(drafter.layers)  # kernels of the identity
    again = {"drafter": str(tmp_path / "run"), "output_dir": str(tmp_path / "again"), "conv_kernel_size": 3}
    assert train(start | again) == 2
    assert "conv_kernel_size of the drafter must be 2, got 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_only": "head", "drafter": None}, "train_only of a new drafter must be None, got 'head'"),
        ({"train_only": "head"}, "must be one with a correction head, got 'DFlash'"),
        ({"train_only": "backbone"}, "train_only must be 'head' or left out, got 'backbone'"),
        ({"eval_strategy": "epoch", "eval_file": None}, "eval_strategy must be no without eval_file, got 'epoch'"),
        (
            {"shift_label": True, "projector_type": "domino"},
            "the drafter has its own shape. You can only change block_size",
        ),
    ],
)
def test_what_cannot_be_trained_so_is_refused(change, message, start, train, capsys):
    assert train(start | change) == 2
    assert message in capsys.readouterr().err

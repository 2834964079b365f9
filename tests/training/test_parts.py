"""LoRA over a drafter and a head over a frozen backbone: what is trained, saved, loaded, gone on with and refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_domino import DominoDraftModel
from hf_domino.training.evidence.acceptance import walk_acceptance

pytest.importorskip("peft")


def of_head(name: str) -> bool:
    return name.split(".")[0] in ("prefix_gru", "embed_proj")


@pytest.fixture
def base(target, make_drafter, tmp_path) -> str:
    make_drafter(target).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def test_lora_trains_every_matrix_and_loads_merged(target, base, make_trainer, greedy_rows, tmp_path):
    before = DominoDraftModel.from_pretrained(base).state_dict()
    drafter = DominoDraftModel.from_pretrained(base)
    with pytest.raises(ValueError, match="must be one loaded from a folder or the Hub, got 'a new one'"):
        make_trainer(drafter.restricted(range(9)), greedy_rows, lora_rank=2)  # its adapter would name the other
    trainer = make_trainer(drafter, greedy_rows, greedy_rows, max_steps=8, lora_rank=4, learning_rate=0.02)
    trainer.train()
    trainer.save_model()
    stored = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert {min(weight.shape) for weight in stored.values()} == {4}
    assert not (tmp_path / "run" / "config.json").exists()
    merged = DominoDraftModel.from_pretrained(tmp_path / "run")
    changed = {name for name, weight in merged.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name, weight in before.items() if weight.ndim == 2}
    texts = [row["input_ids"] for row in greedy_rows]
    walked = walk_acceptance(merged, target, texts, [4] * len(texts))
    assert walked == walk_acceptance(trainer.drafter, target, texts, [4] * len(texts))
    merged.export(tmp_path / "merged", dtype="float32")
    torch.testing.assert_close(
        DominoDraftModel.from_pretrained(tmp_path / "merged").state_dict(), merged.state_dict(), rtol=0, atol=0
    )


def test_a_resumed_lora_training_equals_an_uninterrupted_one_and_is_of_one_drafter_and_target(
    target, base, make_trainer, greedy_rows, tmp_path
):
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    fields = {"max_steps": 4, "lora_rank": 2, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1}

    def trained(folder=base, resumed=checkpoint, **changes):
        torch.manual_seed(resumed is None)  # what a resumed one starts from does not matter
        trainer = make_trainer(DominoDraftModel.from_pretrained(folder), greedy_rows, **(fields | changes))
        trainer.train(resume_from_checkpoint=resumed)
        return {name: weight.clone() for name, weight in trainer.drafter.named_parameters()}

    torch.testing.assert_close(trained(resumed=None), trained(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"lora_rank must be 2, with which .* was trained, got 3"):
        trained(lora_rank=3)
    drafter = DominoDraftModel.from_pretrained(base)
    drafter.norm.weight.data += 1
    drafter.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"drafter under the adapters must be '\w+', with which .*checkpoint-2"):
        trained(tmp_path / "other")
    target.model.layers[0].mlp.up_proj.weight.data.normal_()
    with pytest.raises(ValueError, match="the target's weights_digest must be"):
        trained()


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


def test_lora_by_the_command(start, train, tmp_path):
    assert train(start, "--lora_rank=2") == 0  # without a head, too
    assert json.loads((tmp_path / "run/adapter_config.json").read_text())["base_model_name_or_path"] == start["drafter"]
    card = (tmp_path / "run/README.md").read_text()
    assert "| lora_rank | 2 |" in card
    assert "library_name: hf_domino" in card
    drafter = DominoDraftModel.from_pretrained(tmp_path / "run")
    assert drafter.config.target_name == Path(start["target"]).name  # the drafter it started from names none


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_rank": 2, "drafter": None}, "lora_rank of a new drafter must be None, got 2"),
        ({"train_only": "head"}, "must be one with a correction head, got 'DFlash'"),
        ({"train_only": "backbone"}, "train_only must be 'head' or left out, got 'backbone'"),
        ({"lora_rank": 2, "train_only": "head"}, "train_only with lora_rank must be None, got 'head'"),
        ({"lora_rank": 2, "block_size": 8}, "lora_rank with block_size must be None, got 2"),
        ({"shift_label": True, "projector_type": "domino"}, "the drafter has its own shape. Only another block_size"),
    ],
)
def test_what_cannot_be_trained_so_is_refused(change, message, start, train, capsys):
    assert train(start | change) == 2
    assert message in capsys.readouterr().err

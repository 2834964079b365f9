"""LoRA over a drafter, in TRL's words: trained, saved as PEFT does, loaded by its folder, gone on with, refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from method_table import EVERY, METHODS
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from hf_domino import DominoDraftModel
from hf_domino._common.run_record import Run
from hf_domino.cli.main import main
from hf_domino.training.evidence.acceptance import simulate_acceptance

SHAPES = EVERY | {"eagle3": METHODS["eagle3"] | {"num_hidden_layers": 1, "target_layer_ids": [0, 1, 2]}}


@pytest.fixture
def base(target, make_drafter, tmp_path) -> str:
    make_drafter(target).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def start(recipe, saved_pair):
    """A recipe that trains an adapter over the saved drafter."""
    shape = ("num_hidden_layers", "block_size", "shift_label")
    fields = {name: value for name, value in recipe.items() if name not in shape}
    return fields | {"drafter": str(saved_pair[1]), "use_peft": True}


def test_lora_is_trained_saved_and_loaded_by_its_folder(target, base, make_trainer, greedy_rows, tmp_path):
    before = DominoDraftModel.from_pretrained(base).state_dict()
    lora = {"use_peft": True, "lora_r": 4, "lora_alpha": 8, "learning_rate": 0.02}
    trainer = make_trainer(DominoDraftModel.from_pretrained(base), greedy_rows, greedy_rows, max_steps=8, **lora)
    trainer.train()
    trainer.save_model()
    run = tmp_path / "run"
    fields = json.loads((run / "adapter_config.json").read_text())
    assert (fields["base_model_name_or_path"], fields["peft_type"]) == (base, "LORA")
    assert (fields["r"], fields["lora_alpha"]) == (4, 8)
    assert {min(weight.shape) for weight in load_file(run / "adapter_model.safetensors").values()} == {4}
    assert not (run / "config.json").exists()
    loaded = DominoDraftModel.from_pretrained(run)
    changed = {name for name, weight in loaded.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name, weight in before.items() if weight.ndim == 2 and "gru" not in name}
    texts = [row["input_ids"] for row in greedy_rows]
    walked = simulate_acceptance(loaded, target, texts, [4] * len(texts))
    assert walked == simulate_acceptance(trainer.drafter, target, texts, [4] * len(texts))
    by_peft = PeftModel.from_pretrained(DominoDraftModel.from_pretrained(base), run).merge_and_unload()
    torch.testing.assert_close(loaded.state_dict(), by_peft.state_dict(), rtol=0, atol=0)
    assert all(weight.requires_grad for weight in loaded.parameters())  # it is a drafter like others, to be trained on
    loaded.save_pretrained(tmp_path / "whole")
    whole = DominoDraftModel.from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(whole.state_dict(), loaded.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_trained_is_what_is_loaded(shape, target, make_drafter, make_trainer, greedy_rows, tmp_path):
    """The loss is that of the merged weights, and every weight of the adapter takes part in it."""
    make_drafter(target, **SHAPES[shape]).save_pretrained(tmp_path / "base")
    drafter = DominoDraftModel.from_pretrained(tmp_path / "base")
    if shape.startswith("d"):  # heads begin with zeros
        torch.nn.init.normal_(drafter.fc.weight)
    lora = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.0}
    trainer = make_trainer(drafter, greedy_rows, **lora)
    weights = dict(trainer.model.named_parameters())
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    assert {name.split(".")[-3] for name in trained} == {"lora_A", "lora_B"}
    with torch.no_grad():
        for weight in trained.values():
            weight.normal_(std=0.2)
    batch = trainer.get_train_dataloader().collate_fn(greedy_rows[:3])
    loss = trainer.drafter_training(**batch, lambda_base=0.5).loss
    loss.backward()
    assert [name for name, weight in trained.items() if weight.grad is None or not weight.grad.any()] == []
    trainer.model.merge_adapter()
    with torch.no_grad():
        merged = trainer.drafter_training(**batch, lambda_base=0.5).loss
    torch.testing.assert_close(merged, loss.detach(), atol=1e-4, rtol=1e-4)


def test_a_drafter_in_pefts_own_wrapper_is_trained(target, base, make_trainer, greedy_rows, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["prefix_gru.weight_hh_l0"])
    adapted = get_peft_model(DominoDraftModel.from_pretrained(base), config)
    trainer = make_trainer(adapted, greedy_rows, max_steps=2, learning_rate=0.02)
    trainer.train()
    trainer.save_model()
    before, after = (DominoDraftModel.from_pretrained(path).state_dict() for path in (base, tmp_path / "run"))
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {"prefix_gru.weight_hh_l0", *(name for name in before if "q_proj" in name)}
    with pytest.raises(ValueError, match="use_peft of an adapted drafter must be left out, got True"):
        make_trainer(adapted, greedy_rows, use_peft=True)


@pytest.mark.parametrize("start", ["pissa", "olora", "orthogonal", "gaussian", False])
def test_an_adapter_is_loaded_whatever_it_was_started_with(start, base, make_trainer, greedy_rows, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj", "fc"], init_lora_weights=start)
    adapted = get_peft_model(DominoDraftModel.from_pretrained(base), config)
    trainer = make_trainer(adapted, greedy_rows, max_steps=2, learning_rate=0.02)
    trainer.train()
    trainer.save_model()
    loaded = DominoDraftModel.from_pretrained(tmp_path / "run")
    by_peft = PeftModel.from_pretrained(DominoDraftModel.from_pretrained(base), tmp_path / "run").merge_and_unload()
    torch.testing.assert_close(loaded.state_dict(), by_peft.state_dict(), rtol=0, atol=0)
    trained = trainer.model.merge_and_unload().state_dict()
    torch.testing.assert_close(loaded.state_dict(), trained, rtol=1e-5, atol=1e-6)


def test_a_start_that_cannot_be_found_again_is_refused_before_and_after_training(
    base, make_trainer, greedy_rows, tmp_path
):
    message = "init_lora_weights of the adapter .*must be .*'pissa' or 'olora', got 'pissa_niter_4'.*convert"
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa_niter_4")
    adapted = get_peft_model(DominoDraftModel.from_pretrained(base), config)
    with pytest.raises(ValueError, match=message):
        make_trainer(adapted, greedy_rows)
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("names", [["embed_proj"], ["prefix_gru"], ["fc"]])
def test_modules_that_are_trained_whole_beside_an_adapter(names, base, make_trainer, greedy_rows, tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=names)
    adapted = get_peft_model(DominoDraftModel.from_pretrained(base), config)
    trainer = make_trainer(adapted, greedy_rows, greedy_rows, max_steps=2, learning_rate=0.02)
    trainer.train()
    expected = trainer.evaluate()
    trainer.save_model()
    before = DominoDraftModel.from_pretrained(base).state_dict()
    loaded = DominoDraftModel.from_pretrained(tmp_path / "run")
    changed = {name for name, weight in loaded.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if "q_proj" in name or name.split(".")[0] in names}
    found = make_trainer(loaded, greedy_rows, greedy_rows).evaluate()
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_a_resumed_training_equals_an_uninterrupted_one_and_is_of_one_drafter_and_target(
    target, base, make_trainer, greedy_rows, tmp_path
):
    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    lora = {"use_peft": True, "lora_r": 2, "lora_dropout": 0.1}
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "logging_steps": 1} | lora

    def trained(folder=base, resumed=checkpoint, **changes):
        torch.manual_seed(resumed is None)  # what a resumed one starts from does not matter
        trainer = make_trainer(DominoDraftModel.from_pretrained(folder), greedy_rows, **(fields | changes))
        trainer.train(resume_from_checkpoint=resumed)
        return {name: weight.clone() for name, weight in trainer.drafter.named_parameters()}

    torch.testing.assert_close(trained(resumed=None), trained(), rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"lora_r must be 2, with which .* was trained, got 3"):
        trained(lora_r=3)
    with pytest.raises(ValueError, match=r"use_peft must be True, with which .* was trained, got False"):
        trained(use_peft=False, lora_r=None, lora_dropout=None)
    drafter = DominoDraftModel.from_pretrained(base)
    drafter.fc.weight.data.neg_()
    drafter.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"drafter under the adapter must be '\w+', with which .*checkpoint-2"):
        trained(tmp_path / "other")
    target.model.layers[0].mlp.up_proj.weight.data.normal_()
    with pytest.raises(ValueError, match="the target's weights_digest must be"):
        trained()


def test_by_the_commands(start, train, saved_pair, tmp_path, capsys):
    """Trained, said in the card, gone on with, checked, exported, and trained on."""
    assert train(start, "--max-steps", "2") == 0
    assert train(start, "--lora-r", "16") == 0  # to the end of the recipe, from its checkpoint
    run = tmp_path / "run"
    card = (run / "README.md").read_text()
    said = ("| lora_r | 16 |", "| steps | 4 |", "adapter for the drafter `drafter", "pip install peft ", "- lora\n")
    assert [words for words in said if words not in card] == []
    assert main(["push", str(run), "--card-only"]) == 0
    assert (run / "README.md").read_text() == card
    assert json.loads((run / "target.json").read_text())["name"] == Path(start["target"]).name
    assert DominoDraftModel.from_pretrained(run).config.target_name == Path(start["target"]).name
    pair = ["--target", start["target"], "--drafter", str(run)]
    assert main(["generate", *pair, "--max-new-tokens", "8", "t7 t8"]) == 0
    assert main(["check", *pair, "--max-new-tokens", "8", "--prompts", start["eval_file"]]) in (0, 1, 3)
    assert main(["export", "--drafter", str(run), "--output", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    again = {"drafter": str(run), "output_dir": str(tmp_path / "again"), "eval_file": None}
    again |= {"gradient_checkpointing": True}
    assert train(start | again) == 0  # an adapter over an adapter
    second = DominoDraftModel.from_pretrained(tmp_path / "again").state_dict()
    assert not torch.equal(second["fc.weight"], DominoDraftModel.from_pretrained(run).state_dict()["fc.weight"])
    capsys.readouterr()
    assert main(["push", str(run), "me/adapter", "--dry-run"]) == 2
    assert "base_model_name_or_path of adapter_config.json must be a name on the Hub" in capsys.readouterr().err


def test_a_folder_holds_the_last_of_a_whole_drafter_and_an_adapter(start, train, tmp_path):
    fields, run = start | {"eval_file": None, "max_steps": 1, "overwrite": True}, tmp_path / "run"
    for use_peft in (True, False, True):
        assert train(fields | {"use_peft": use_peft}) == 0
        assert (run / "adapter_config.json").exists() is use_peft
        assert (run / "config.json").exists() is not use_peft
        DominoDraftModel.from_pretrained(run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter": None}, "use_peft of a new drafter must be None, got True"),
        ({"use_peft": False, "lora_r": 8}, "lora_r without use_peft must be left out, got 8"),
        ({"train_only": "head"}, "train_only with use_peft must be left out, got 'head'"),
        ({"muon_learning_rate": 0.01}, "muon_learning_rate with use_peft must be left out, got 0.01"),
        ({"block_size": 8}, "use_peft with block_size must be False, got True"),
        ({"lora_r": 0}, "lora_r must be at least 1, got 0"),
        ({"lora_dropout": 1.0}, "lora_dropout must be in [0, 1), got 1.0"),
        (
            {"lora_target_modules": ["q_proj", "query"]},
            "lora_target_modules must be 'all-linear', or among fc, q_proj, k_proj, v_proj, o_proj, gate_proj, "
            "up_proj, down_proj, embed_proj.0, embed_proj.2, got ['query']",
        ),
    ],
)
def test_what_cannot_be_trained_so_is_refused(change, message, start, train, capsys):
    assert train(start | change) == 2
    assert message in capsys.readouterr().err


def test_an_adapter_is_not_written_over_its_drafter(start, train, tmp_path, capsys):
    shutil.copytree(start["drafter"], tmp_path / "run")
    Run(steps=1).save(tmp_path / "run")  # of its training
    assert train(start | {"drafter": str(tmp_path / "run")}) == 2
    assert "the drafter of use_peft must be one loaded from a folder or the Hub other than" in capsys.readouterr().err


def test_peft_is_named_where_it_is_missing(start, train, monkeypatch, capsys, base, tmp_path):
    get_peft_model(DominoDraftModel.from_pretrained(base), LoraConfig(target_modules=["fc"])).save_pretrained(
        tmp_path / "adapter"
    )
    for module in ("hf_domino.training.arguments", "hf_domino.formats.source"):
        monkeypatch.setattr(f"{module}.is_peft_available", lambda: False)
    assert train(start) == 2
    assert "use_peft must be False without the package peft, got True. Run `pip" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"adapter_config.json must be absent without the package peft, .*pip install"):
        DominoDraftModel.from_pretrained(tmp_path / "adapter")

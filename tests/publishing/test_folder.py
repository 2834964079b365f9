"""What of a folder is published, and which folders are refused, before anything is asked of the network."""

from __future__ import annotations

import json

import pytest
from builders import build_drafter
from safetensors.torch import load_file, save_file

from hf_domino.publishing import push
from hf_domino.publishing.folder_card import card_for

NAME, SECRET = "me/drafter", "hf_" + "a1B2" * 9


@pytest.fixture
def folder(tiny_qwen3, tmp_path):
    """A drafter's folder with a card."""
    folder = tmp_path / "drafter"
    build_drafter(tiny_qwen3, target_name="org/target").save_pretrained(folder)
    (folder / "README.md").write_text(card_for(folder))
    return folder


def test_only_what_a_drafter_is_made_of_goes(folder):
    for name in ("LICENSE", "results.jsonl.part", "custom_generate/generate.py", "custom_generate/__pycache__/x.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    for name in ("optimizer.pt", ".cache", "extra.safetensors", "tokens.txt", "checkpoint-2/model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    plan = push(folder, NAME, dry_run=True)
    assert list(plan.files) == [
        "LICENSE",
        "README.md",
        "config.json",
        "custom_generate/generate.py",
        "model.safetensors",
    ]
    assert plan.files["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    stays = [".cache", "checkpoint-2", "extra.safetensors", "optimizer.pt", "results.jsonl.part", "tokens.txt"]
    assert plan.left_out == stays
    assert "tokens.txt" in str(plan)
    assert plan.commit is None


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def without_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if name != "fc.weight"}, folder / "model.safetensors")


def adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


def with_token(folder):
    (folder / "README.md").write_text((folder / "README.md").read_text() + f"\ntoken: {SECRET}\n")


def with_results(folder):
    section = "<!-- hf_domino:begin results -->\n## Results\n\n9.99 x\n<!-- hf_domino:end results -->\n"
    (folder / "README.md").write_text((folder / "README.md").read_text() + section)


def without_shards(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "model-1.safetensors"}}')


def without_target(folder):
    (folder / "README.md").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_name": None}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pickled, "model.safetensors must be among the weights .* Pickled weights .* are not loaded"),
        (cut, "model.safetensors of the checkpoint must be a whole safetensors file"),
        (without_a_tensor, "tensors must be complete .* got 'a file without fc.weight'"),
        (adapter, "FOLDER must be that of a drafter, with config.json, .*merge_and_unload"),
        (with_token, "README.md must be free of tokens, got 'what looks like a token of the Hub'"),
        (with_results, "section 'results' of .* must be computed from .*results.jsonl"),
        (without_shards, "model-1.safetensors of model.safetensors.index.json must be in"),
        (without_target, "--target must be given"),
    ],
)
def test_what_is_not_fit_to_be_published_is_refused(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        push(folder, NAME, dry_run=True)
    assert SECRET not in str(caught.value)


def test_a_target_is_no_drafter(saved_pair):
    with pytest.raises(ValueError, match="must be 'domino', got 'qwen3': this is no drafter"):
        push(saved_pair[0], NAME, dry_run=True)


@pytest.mark.parametrize(
    ("name", "message"), [("drafter", "must be OWNER/NAME"), ("me/my drafter", "must use alphanum")]
)
def test_where_nothing_can_go_is_refused(folder, name, message):
    with pytest.raises(ValueError, match=message):
        push(folder, name, dry_run=True)

"""What of a folder is published, and which folders are refused, before anything is asked of the network."""

from __future__ import annotations

import pytest
from builders import build_drafter
from safetensors.torch import load_file, save_file

from hf_domino.publishing import push
from hf_domino.publishing.folder_card import card_for

NAME = "me/drafter"


@pytest.fixture
def folder(tiny_qwen3, tmp_path):
    """A drafter's folder with a card."""
    folder = tmp_path / "drafter"
    build_drafter(tiny_qwen3, target_name="org/target").save_pretrained(folder)
    (folder / "README.md").write_text(card_for(folder))
    return folder


def test_only_what_a_drafter_is_made_of_goes(folder):
    goes = ["LICENSE", "custom_generate/generate.py", "figures/speed-up.svg"]
    inside = ["custom_generate/__pycache__/x.pyc", "figures/notes.txt"]
    stays = [".cache", "checkpoint-2", "extra.safetensors", "optimizer.pt", "results.jsonl.part", "tokens.txt"]
    for name in (*goes, *inside, *stays):
        place = folder / (f"{name}/model.safetensors" if name == "checkpoint-2" else name)
        place.parent.mkdir(exist_ok=True)
        place.write_text("")
    plan = push(folder, NAME, dry_run=True)
    assert list(plan.files) == sorted([*goes, "README.md", "config.json", "model.safetensors"])
    assert plan.files["model.safetensors"] == (folder / "model.safetensors").stat().st_size
    assert (plan.left_out, plan.commit) == (stays, None)
    assert "tokens.txt" in str(plan)


def without_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if name != "fc.weight"}, folder / "model.safetensors")


def without_configuration(folder):
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (without_a_tensor, NAME, "without fc.weight"),
        (without_configuration, NAME, "FOLDER must be that of a drafter, with config.json or adapter_config.json"),
        (None, "drafter", "must be OWNER/NAME"),
        (None, "me/my drafter", "must use alphanum"),
    ],
)
def test_what_is_not_fit_to_be_published_is_refused(folder, damage, name, said):
    if damage is not None:
        damage(folder)
    with pytest.raises(ValueError, match=said):
        push(folder, name, dry_run=True)

"""What of a folder is published, and which folders are refused, before anything is asked of the network."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from builders import build_drafter
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from safetensors.torch import load_file, save_file

from hf_domino.publishing import push
from hf_domino.publishing.answers import explained
from hf_domino.publishing.folder import plan_push
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
    for name in ("optimizer.pt", ".cache", "extra.safetensors", "tokens.txt", "notes.ipynb"):
        (folder / name).write_text("")
    plan = plan_push(folder, NAME)
    sizes = {file.path: (file.size, file.is_large) for file in plan.files}
    assert list(sizes) == ["LICENSE", "README.md", "config.json", "custom_generate/generate.py", "model.safetensors"]
    assert sizes["model.safetensors"] == ((folder / "model.safetensors").stat().st_size, True)
    assert plan.left_out["optimizer.pt"] == "a pickle, which can hold anything"
    assert plan.left_out["extra.safetensors"] == "not read by from_pretrained"
    assert len(plan.left_out) == 7
    assert "tokens.txt" in str(plan)


def test_links_out_of_the_folder_stay(folder, tmp_path):
    (tmp_path / "secret").write_text("of another project")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    (folder / "NOTICE").write_text("mine")
    (folder / "LICENSE.txt").symlink_to(folder / "NOTICE")
    plan = plan_push(folder, NAME)
    assert plan.left_out == {"LICENSE": "a link out of the folder"}
    assert {"NOTICE", "LICENSE.txt"} <= {file.path for file in plan.files}


def test_the_card_names_the_repository(folder):
    assert f'"{NAME}"' in plan_push(folder, NAME).card
    assert NAME not in (folder / "README.md").read_text()


def test_a_card_is_made_where_there_is_none(folder):
    (folder / "README.md").unlink()
    assert "base_model: org/target" in plan_push(folder, NAME).card
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"target_name": None}))
    with pytest.raises(ValueError, match=r"Write the card first: hf-domino card .* --target OWNER/NAME"):
        plan_push(folder, NAME)


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def without_a_tensor(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name: weights[name] for name in weights if name != "fc.weight"}, folder / "model.safetensors")


def without_config(folder):
    (folder / "config.json").unlink()


def adapter(folder):
    (folder / "config.json").rename(folder / "adapter_config.json")


def with_token(folder):
    (folder / "README.md").write_text((folder / "README.md").read_text() + f"\ntoken: {SECRET}\n")


def with_own_token(folder):
    (folder / "LICENSE").write_text("my own secret")


def without_rows(folder):
    section = "<!-- hf_domino:begin results -->\n## Results\n\n9.99 x\n<!-- hf_domino:end results -->\n"
    (folder / "README.md").write_text((folder / "README.md").read_text() + section)


def without_shards(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "model-1.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (pickled, "model.safetensors must be among the weights .* Pickled weights .* are not loaded"),
        (cut, "model.safetensors of the checkpoint must be a whole safetensors file"),
        (without_a_tensor, "tensors must be complete .* got 'a file without fc.weight'"),
        (without_config, "the folder must be that of a drafter, with config.json"),
        (adapter, "the folder must be that of a whole drafter, got 'an adapter .*merge_and_unload"),
        (with_token, "README.md must be free of tokens, got 'what looks like a token of the Hub'"),
        (with_own_token, "LICENSE must be free of tokens"),
        (without_rows, "'results' .* must have its rows beside it"),
        (without_shards, "model-1.safetensors of model.safetensors.index.json must be in"),
    ],
)
def test_what_is_not_fit_to_be_published_is_refused(folder, monkeypatch, damage, message):
    monkeypatch.setenv("HF_TOKEN", "my own secret")
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        push(folder, NAME, dry_run=True)
    assert SECRET not in str(caught.value)


def test_a_target_is_no_drafter(saved_pair):
    with pytest.raises(ValueError, match="must be 'domino', got 'qwen3': this is no drafter"):
        push(saved_pair[0], NAME, dry_run=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"repo_id": "drafter"}, r"must be OWNER/NAME on the Hub \(there is no owner in it\), got 'drafter'"),
        ({"repo_id": "me/my drafter"}, "must be OWNER/NAME on the Hub"),
        ({"repo_id": NAME, "create_pr": True, "revision": "mine"}, "revision together with create_pr"),
    ],
)
def test_where_nothing_can_go_is_refused(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        push(folder, dry_run=True, **arguments)


def answer(status, said=None):
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return HfHubHTTPError("long story", response=response, server_message=said)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (answer(412, "A commit has happened"), r"The Hub answers 412 \(A commit has happened\). Somebody else changed"),
        (answer(429), r"The Hub answers 429 \(long story\). Wait a few minutes and try again. Who is logged in"),
        (answer(502), r"The Hub answers 502 \(long story\). It has a problem. Wait a few minutes"),
        (HTTPError("no route"), r"The Hub does not answer \(no route\): check the connection, or HF_ENDPOINT"),
    ],
)
def test_what_the_hub_says_has_a_way_out(error, message):
    with pytest.raises(ValueError, match=f"pushing to {NAME} failed: {message}"), explained(NAME, "pushing to"):
        raise error


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="ours"), explained(NAME, "pushing to"):
        raise RuntimeError("ours")

"""Drafters go to the Hub and come back, between processes, by huggingface_hub's own client and a server's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import build_drafter
from client import digests
from hub_repos import oid_of
from hub_server import READER, TOKEN, HubServer

from hf_domino import DominoConfig
from hf_domino._common.run_record import Run
from hf_domino.formats.exporting import stored_config
from hf_domino.publishing.folder_card import card_for

CLIENT = Path(__file__).with_name("client.py")
TARGET, DRAFTER, EAGLE, GATED = "org/target", "org/target-domino", "other/target-eagle3", "other/target-dflash"
PICKLED = "other/target-eagle3-pickled"
REMOTE_CARD = b"---\nlicense: mit\ntags:\n- mine\n---\n# My drafter\n\nA note of its owner.\n"
NOTED = "A note of its owner."


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """Where processes keep what they download and print."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(scope="module")
def process(server, homes):
    """Run scenarios of `client.py` in a process of a user, and return what each returned."""

    def run(user: str, scenarios: dict[str, tuple[str, ...]], **environment: str) -> dict:
        settings = {"HF_ENDPOINT": server.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(homes / user)}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        command = [sys.executable, str(CLIENT), json.dumps(scenarios)]
        done = subprocess.run(command, env=inherited | settings | environment, capture_output=True, text=True)
        with (homes / f"{user}.log").open("a") as log:
            log.write(done.stdout + done.stderr)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture(scope="module")
def folder(tiny_qwen3, tmp_path_factory):
    """A drafter's folder after a training: weights in shards, a card, and what is nobody's business."""
    folder = tmp_path_factory.mktemp("my") / "drafter"
    drafter = build_drafter(tiny_qwen3, target_name=TARGET)
    drafter.save_pretrained(folder, max_shard_size="40KB")
    (folder / "README.md").write_text(card_for(folder))
    for private in ("training_args.bin", "checkpoint-2/optimizer.pt", "on_policy_train-1-of-1.jsonl"):
        (folder / private).parent.mkdir(exist_ok=True)
        (folder / private).write_text("private")
    Run(steps=2).save(folder)
    return folder


@pytest.fixture(scope="module")
def target_files(tiny_qwen3, tiny_tokenizer, tmp_path_factory):
    """The files of a target's repository."""
    folder = tmp_path_factory.mktemp("target")
    tiny_qwen3.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def published(server, process, folder, target_files):
    """What a process that publishes saw: pushes that broke off, went on, made a repository, and all that fails."""
    server.add(TARGET, target_files, downloads=9)
    server.add(DRAFTER, {"README.md": REMOTE_CARD})
    server.outages = [1]
    arguments, new = (str(folder), DRAFTER), (str(folder), "org/new")
    scenarios = {
        "broken": ("command", "push", *arguments),
        "pushed": ("command", "push", *arguments),
        "by_nobody": ("push_as", "", *arguments),
        "by_reader": ("push_as", READER, *new),
        "by_stranger": ("push_as", TOKEN[:-1] + "x", *arguments),
        "to_private": ("command", "push", *arguments, "--private"),
        "new": ("command", "push", *new, "--private"),
    }
    return process("owner", scenarios, HF_TOKEN=TOKEN)


def test_what_is_pushed(published, server, folder, target_files):
    """One test, as the process takes long and is started once."""
    # An upload that broke off is resumed.
    assert published["broken"]["code"] == 2
    assert "broke off: Error while uploading" in published["broken"]["err"]
    assert "The same command sends the rest" in published["broken"]["err"]
    commit = server.repos[DRAFTER].branches["main"]
    assert f"{server.url}/{DRAFTER}/commit/{commit}\ncommit {commit}\n" in published["pushed"]["out"]
    batch = f"/{DRAFTER}.git/info/lfs/objects/batch"
    paths = [path for _, path, _ in server.requests]
    second = paths.index(batch, paths.index(batch) + 1)  # the second push asks what is missing
    weights = {oid_of(path.name, path.read_bytes()) for path in folder.glob("*.safetensors")}
    assert len(weights - {path.removeprefix("/store/") for path in paths[second:]}) == 1  # that which had arrived
    assert weights <= set(server.received)
    assert len(server.received) == len(set(server.received))

    # A card on the Hub is merged.
    card = server.repos[DRAFTER].files["README.md"].decode()
    assert NOTED in card
    assert f'"{DRAFTER}"' in card
    assert {"mine", "speculative-decoding", f"base_model:{TARGET}"} <= server.repos[DRAFTER].tags()

    # Who may not push is told why.
    assert "or be logged in to Hugging Face with `hf auth login`" in published["by_nobody"]["err"]
    assert "pushing to org/new failed: 403 Forbidden: You don't have the required" in published["by_reader"]["err"]
    assert "Invalid credentials" in published["by_stranger"]["err"]
    assert "private must be False for org/target-domino, which is public already" in published["to_private"]["err"]
    assert {published[who]["code"] for who in ("by_nobody", "by_reader", "by_stranger", "to_private")} == {2}

    # A new repository is as private as it was asked to be.
    new = server.repos["org/new"]
    assert new.private
    assert {".gitattributes", "README.md", "config.json"} < set(new.files)


@pytest.fixture(scope="module")
def loaded(published, server, process, folder):
    """What one process of somebody else saw, who has no token."""
    commit = server.repos[DRAFTER].branches["main"]
    card = b"---\nbase_model: org/target\ntags:\n- eagle3\n---\n"
    eagle = {"speculators_model_type": "eagle3", "transformer_layer_config": {"num_hidden_layers": 1}}
    eagle = json.dumps(eagle).encode()
    server.add(EAGLE, {"config.json": eagle, "README.md": card, "model.safetensors": b""}, downloads=5)
    server.add(PICKLED, {"config.json": eagle, "README.md": card, "pytorch_model.bin": b""}, downloads=5)
    server.add(GATED, {"config.json": b"{}"}, gated=True, downloads=4)
    block = json.dumps(stored_config(DominoConfig(projector_type="dspark", target_layer_ids=[1]))).encode()
    server.add("org/target-dspark", {"config.json": block, "model.safetensors": b""}, downloads=6)
    server.add("org/target-draft-notes", {"README.md": b""}, downloads=3)
    server.add("org/target-draft-gone", {"config.json": block}, gone=True, downloads=8)
    odd = {"architectures": ["DFlashDraftModel"], "block_size": [16], "dflash_config": {"target_layer_ids": 3}}
    for name, content in (("list", b"[1, 2]"), ("odd", json.dumps(odd).encode()), ("binary", b"\xff\xfe")):
        server.add(f"org/target-draft-{name}", {"config.json": content, "model.safetensors": b""}, downloads=7)
    for how in ("short", "broken", "garbled"):
        server.add(f"org/{how}", server.repos[DRAFTER].files)
        server.damage[f"org/{how}"] = how
    scenarios = {
        "drafter": ("load", DRAFTER, commit),
        "commits": ("commits", TARGET, DRAFTER),
        "found": ("command", "find", TARGET),
        "missing": ("command", "find", "org/nothing"),
        **{name: ("load_error", f"org/{name}") for name in ("short", "broken", "garbled")},
        "gated": ("load_error", GATED),
    }
    return process("reader", scenarios) | {"commit": commit}


def test_what_is_loaded(published, loaded, server, tiny_qwen3):
    """One test, as the process takes long and is started once."""
    # The round trip is bit exact.
    assert loaded["drafter"]["digests"] == digests(build_drafter(tiny_qwen3))
    assert loaded["drafter"]["commit"] == loaded["commit"]

    # Rows tell the commits of what was loaded.
    assert loaded["commits"] == [server.repos[TARGET].branches["main"], loaded["commit"]]

    # What is found says which drafters load.
    assert loaded["found"]["code"] == 0, loaded["found"]["err"]
    found = dict(each.split(": ", maxsplit=1) for each in loaded["found"]["out"].split("\n\n"))
    said = [
        (DRAFTER, f'loads (domino)\n  drafter = DominoDraftModel.from_pretrained("{DRAFTER}")\n'),
        (EAGLE, "loads (EAGLE-3 (speculators"),
        ("org/target-dspark", "loads (DFlash configuration (z-lab"),
        (PICKLED, "does not load: a drafter without weights in safetensors (EAGLE-3"),
        (GATED, "does not load: access is granted on request, on its page"),
        ("org/target-draft-notes", "does not load: not a drafter: there is no config.json"),
        (
            "org/target-draft-gone",
            "does not load: the Hub lists it, but does not serve it: 401 Client Error. Repository",
        ),
        *(
            (f"org/target-draft-{name}", "does not load: its config.json cannot be read: ")
            for name in ("list", "binary")
        ),
        ("org/target-draft-odd", "does not load: "),
    ]
    assert [name for name, words in said if f"\n  {words}" not in found[name]] == []
    assert "finding drafters for org/nothing failed: 401 Client Error. Repository Not Found" in loaded["missing"]["err"]

    # What cannot be downloaded has one clear error.
    assert "gated repo" in loaded["gated"]
    for how, reason in (("short", "should be of size 33896 but has size 16948"), ("broken", "closed connection")):
        assert f"ValueError: model-00001-of-00003.safetensors of org/{how} must be downloaded completely" in loaded[how]
        assert reason in loaded[how]
    assert "model-00001-of-00003.safetensors of the checkpoint must be a whole safetensors file" in loaded["garbled"]


@pytest.fixture(scope="module")
def offline(loaded, server, process, folder):
    """What the same one saw in a new process without the Hub."""
    before = len(server.requests)
    push = "command", "push", str(folder), DRAFTER
    scenarios = {
        "drafter": ("load", DRAFTER, loaded["commit"]),
        "missing": ("load_error", "org/nothing"),
        "found": ("command", "find", TARGET),
        "pushed": push,
        "dry": (*push, "--dry-run"),
    }
    results = process("reader", scenarios, HF_HUB_OFFLINE="1", HF_TOKEN=TOKEN)
    assert len(server.requests) == before
    return results


def test_what_works_offline(published, loaded, offline, server, homes, folder):
    """One test, as the process takes long and is started once."""
    # A dry run lists exactly what goes.
    dry, pushed = (result["out"].split("\nleft out: ") for result in (offline["dry"], published["pushed"]))
    listed = [[line.split()[0] for line in part[0].splitlines()] for part in (dry, pushed)]
    assert listed[0] == listed[1] == sorted(server.repos[DRAFTER].files)
    assert dry[1].startswith("checkpoint-2, on_policy_train-1-of-1.jsonl, run.json, training_args.bin\n")

    # What was downloaded works.
    assert offline["drafter"] == loaded["drafter"]
    assert "got 'org/nothing': there is no such folder, it was not downloaded before" in offline["missing"]
    for name in ("found", "pushed"):
        assert "offline mode is enabled" in offline[name]["err"]

    # The token is nowhere.
    places = [path for place in (homes, folder) for path in place.rglob("*") if path.is_file()]
    contents = [path.read_bytes() for path in places]
    contents += [content for repo in server.repos.values() for content in repo.files.values()]
    assert len(places) > 10
    assert not [token for token in (TOKEN, READER) if any(token.encode() in content for content in contents)]
    assert {token for method, path, token in server.requests if path.startswith("/store")} == {None}

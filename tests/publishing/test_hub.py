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
    for private in ("training_args.bin", "checkpoint-2/optimizer.pt", "on_policy_train-1-of-1.jsonl", "run.json"):
        (folder / private).parent.mkdir(exist_ok=True)
        (folder / private).write_text("private")
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
        "pushed": ("command", "push", *arguments, "--json"),
        "by_nobody": ("push_as", "", *arguments),
        "by_reader": ("push_as", READER, *new),
        "by_stranger": ("push_as", TOKEN[:-1] + "x", *arguments),
        "to_private": ("command", "push", *arguments, "--private"),
        "proposed": ("push_as", READER, str(folder), TARGET, "--create-pr", "--json"),
        "new": ("command", "push", *new, "--private", "--revision", "mine", "--message", "Mine", "--json"),
        "by_method": ("push_by_method", str(folder), "org/by-method"),
    }
    return process("owner", scenarios, HF_TOKEN=TOKEN)


def check_an_upload_that_broke_off_is_resumed(published, server, folder):
    assert published["broken"]["code"] == 2
    assert "broke off: Error while uploading" in published["broken"]["err"]
    assert "The same command sends the rest" in published["broken"]["err"]
    commit = json.loads(published["pushed"]["out"])["commit"]
    assert commit == server.repos[DRAFTER].branches["main"]
    batch = f"/{DRAFTER}.git/info/lfs/objects/batch"
    paths = [path for _, path, _ in server.requests]
    second = paths.index(batch, paths.index(batch) + 1)  # the second push asks what is missing
    weights = {oid_of(path.name, path.read_bytes()) for path in folder.glob("*.safetensors")}
    assert len(weights - {path.removeprefix("/store/") for path in paths[second:]}) == 1  # that which had arrived
    assert weights <= set(server.received)
    assert len(server.received) == len(set(server.received))


def check_a_card_on_the_hub_is_merged(published, server):
    card = server.repos[DRAFTER].files["README.md"].decode()
    assert NOTED in card
    assert f'"{DRAFTER}"' in card
    assert {"mine", "speculative-decoding", f"base_model:{TARGET}"} <= server.repos[DRAFTER].tags()


def check_who_may_not_push_is_told_why(published):
    assert "or be logged in to Hugging Face with `hf auth login`" in published["by_nobody"]["err"]
    assert "pushing to org/new failed: 403 Forbidden: You don't have the required" in published["by_reader"]["err"]
    assert "Invalid credentials" in published["by_stranger"]["err"]
    assert "private must be False for org/target-domino, which is public already" in published["to_private"]["err"]
    assert {published[who]["code"] for who in ("by_nobody", "by_reader", "by_stranger", "to_private")} == {2}


def check_pull_requests_and_branches_leave_main_alone(published, server, target_files):
    target, new = server.repos[TARGET], server.repos["org/new"]
    proposed, branch = (json.loads(published[name]["out"]) for name in ("proposed", "new"))
    assert target.files == target_files
    assert proposed["url"] == f"{server.url}/{TARGET}/discussions/1"
    assert proposed["commit"] == target.branches["refs/pr/1"]
    assert branch["commit"] == new.branches["mine"]
    assert new.private
    assert set(new.files) == {".gitattributes"}


def check_push_to_hub_of_transformers_sends_a_card(published, server):
    repo = server.repos["org/by-method"]
    assert published["by_method"] == repo.branches["main"]
    assert {"speculative-decoding", f"base_model:{TARGET}"} <= repo.tags()


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
    server.add("org/target-draft-notes", {"README.md": b""}, downloads=3)
    for how in ("short", "broken", "garbled"):
        server.add(f"org/{how}", server.repos[DRAFTER].files)
        server.damage[f"org/{how}"] = how
    scenarios = {
        "drafter": ("load", DRAFTER, commit),
        "commits": ("commits", TARGET, DRAFTER, "main"),
        "found": ("command", "find", TARGET, "--json"),
        "missing": ("command", "find", "org/nothing"),
        **{name: ("load_error", f"org/{name}") for name in ("short", "broken", "garbled")},
        "gated": ("load_error", GATED),
    }
    return process("reader", scenarios) | {"commit": commit}


def check_round_trip_is_bit_exact(loaded, tiny_qwen3):
    assert loaded["drafter"]["digests"] == digests(build_drafter(tiny_qwen3))
    assert loaded["drafter"]["commit"] == loaded["commit"]


def check_rows_tell_the_commits_of_what_was_loaded(loaded, server):
    assert loaded["commits"] == [server.repos[TARGET].branches["main"], loaded["commit"]]


def check_find_says_which_drafters_load(loaded):
    found = {drafter["name"]: drafter for drafter in json.loads(loaded["found"]["out"])}
    assert found[DRAFTER]["format"] == "domino"
    assert found[DRAFTER]["usage"][0] == f'drafter = DominoDraftModel.from_pretrained("{DRAFTER}")'
    assert found[EAGLE]["format"].startswith("EAGLE-3 (speculators")
    assert found[PICKLED]["refused"].startswith("a drafter without weights in safetensors (EAGLE-3")
    assert found[GATED]["refused"] == "access is granted on request, on its page"
    assert found["org/target-draft-notes"]["refused"] == "not a drafter: there is no config.json"
    assert "finding drafters for org/nothing failed: 401 Client Error. Repository Not Found" in loaded["missing"]["err"]


def check_what_cannot_be_downloaded_has_one_clear_error(loaded):
    assert "gated repo" in loaded["gated"]
    for how, reason in (("short", "should be of size 33896 but has size 16948"), ("broken", "closed connection")):
        assert f"ValueError: model-00001-of-00003.safetensors of org/{how} must be downloaded whole" in loaded[how]
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
        "dry": (*push, "--dry-run", "--json"),
    }
    results = process("reader", scenarios, HF_HUB_OFFLINE="1", HF_TOKEN=TOKEN)
    assert len(server.requests) == before
    return results


def check_dry_run_lists_exactly_what_goes(published, offline, server):
    dry, pushed = (json.loads(result["out"]) for result in (offline["dry"], published["pushed"]))
    assert list(dry["files"]) == list(pushed["files"]) == sorted(server.repos[DRAFTER].files)
    assert dry["left_out"] == ["checkpoint-2", "on_policy_train-1-of-1.jsonl", "run.json", "training_args.bin"]


def check_what_was_downloaded_works_offline(offline, loaded):
    assert offline["drafter"] == loaded["drafter"]
    assert "got 'org/nothing': there is no such folder, it was not downloaded before" in offline["missing"]
    for name in ("found", "pushed"):
        assert "offline mode is enabled" in offline[name]["err"]


def check_the_token_is_nowhere(offline, server, homes, folder):
    places = [path for place in (homes, folder) for path in place.rglob("*") if path.is_file()]
    contents = [path.read_bytes() for path in places]
    contents += [content for repo in server.repos.values() for content in repo.files.values()]
    assert len(places) > 10
    assert not [token for token in (TOKEN, READER) if any(token.encode() in content for content in contents)]
    assert {token for method, path, token in server.requests if path.startswith("/store")} == {None}


def test_users_of_the_hub(folder, homes, published, request, server, target_files, tiny_qwen3):
    """One test, as its processes take long and are started once."""
    check_an_upload_that_broke_off_is_resumed(published, server, folder)
    check_a_card_on_the_hub_is_merged(published, server)
    check_who_may_not_push_is_told_why(published)
    check_pull_requests_and_branches_leave_main_alone(published, server, target_files)
    check_push_to_hub_of_transformers_sends_a_card(published, server)
    loaded = request.getfixturevalue("loaded")  # behind the pushes, whose requests were looked at
    check_round_trip_is_bit_exact(loaded, tiny_qwen3)
    check_rows_tell_the_commits_of_what_was_loaded(loaded, server)
    check_find_says_which_drafters_load(loaded)
    check_what_cannot_be_downloaded_has_one_clear_error(loaded)
    offline = request.getfixturevalue("offline")
    check_dry_run_lists_exactly_what_goes(published, offline, server)
    check_what_was_downloaded_works_offline(offline, loaded)
    check_the_token_is_nowhere(offline, server, homes, folder)

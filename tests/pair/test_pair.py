from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from hf_domino import pair as pairs
from hf_domino.formats import source
from hf_domino.formats.source import check_source
from hf_domino.pair import (
    BUNDLED,
    check_device,
    domino_folder,
    find_drafter,
    find_pair,
    find_target,
    load_pair,
    read_prompts,
)


@pytest.mark.parametrize("is_here", [False, True])
def test_load_pair(is_here, tiny_pair_folder, monkeypatch):
    monkeypatch.chdir(tiny_pair_folder)
    pair = load_pair("." if is_here else tiny_pair_folder)
    assert pair.name == "tiny"
    assert pair.drafter.has_correction_head
    assert {parameter.dtype for parameter in pair.target.parameters()} == {torch.float32}
    (prompt, *_) = prompts = read_prompts(tiny_pair_folder / "prompts.jsonl")
    assert (len(prompts), set(prompt)) == (3, {"module", "offset", "sha256", "text"})


def test_the_drafter_of_a_target_may_be_among_those_published_here(tiny_pair_folder, tmp_path, monkeypatch):
    target = tmp_path / "elsewhere/tiny-chat"
    shutil.copytree(tiny_pair_folder, target)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"--drafter must be given: there is no .*tiny-chat-domino"):
        load_pair(target)
    shutil.copytree(tiny_pair_folder.with_name("tiny-domino"), tmp_path / "model_cards/tiny-chat-domino")
    pair = load_pair(target)
    assert (find_pair(target), pair.folder, pair.name) == (target, target, "tiny-chat")
    on_the_hub = target.rename(target.with_name("Tiny-Chat"))
    assert load_pair(on_the_hub).drafter is not None


def test_the_bundled_pair_has_a_short_name(tmp_path, monkeypatch):
    assert find_target(BUNDLED) == find_target() == str(find_pair())
    assert find_drafter(BUNDLED) == str(domino_folder(find_pair()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / BUNDLED).mkdir()
    assert (find_target(BUNDLED), find_drafter(BUNDLED)) == (BUNDLED, BUNDLED)  # a folder of that name comes first


def test_target_without_drafter_is_no_pair(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(FileNotFoundError, match=r"-domino beside it\. Give a --target with its --drafter"):
            find_pair(folder)


def test_an_answered_chat_is_asked_without_its_answer(tmp_path):
    path = tmp_path / "evaluation.jsonl"
    asked, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    path.write_text(json.dumps({"messages": [asked, answer, asked, answer]}))
    assert read_prompts(path)[0]["messages"] == [asked, answer, asked]


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"text": "a"}, {"text": "a"}),
        ({"prompt": "a", "completion": "b"}, {"text": "a"}),
        ({"prompt": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "user", "content": "a"}]}),
        ({"conversations": [{"from": "human", "value": "a"}]}, {"messages": [{"role": "user", "content": "a"}]}),
        (
            {"conversations": [{"from": "human", "value": "a"}], "system": "b"},
            {"messages": [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]},
        ),
    ],
)
def test_every_field_that_holds_a_prompt_is_read(record, prompt, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(record))
    assert [found.items() >= prompt.items() for found in read_prompts(path)] == [True]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"module": "b"}', "line 2: needs `messages`, `conversations`, `prompt` or `text`, got `module`"),
        (b'{"text": ""}', "line 2: field `text` must not be empty"),
        (b'{"text": 3}', "line 2: field `text` must be a string, got 3"),
    ],
)
def test_what_holds_no_prompt_is_refused_with_its_place(line, message, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line)
    with pytest.raises(ValueError, match=re.escape(f"{path}, {message}")):
        read_prompts(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="--prompts must hold at least one prompt, got none in"):
        read_prompts(path)


@pytest.mark.parametrize("device", ["nonsense", *([] if torch.cuda.is_available() else ["cuda:1"])])
def test_a_device_that_is_not_there_is_refused(device):
    check_device("cpu")
    with pytest.raises(ValueError, match=rf"--device must be one that torch .* can use, got '{device}' \("):
        check_device(device)


# --- folders and Hub names --------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A function that makes the Hub answer with an error, or know every name."""

    def answers(error=None):
        def head(url, token, timeout):
            asked.append(url)
            if error is not None:
                raise error

        asked = []
        monkeypatch.setattr(source, "get_hf_file_metadata", head)
        return asked

    return answers


def refused(kind):
    """An error of the Hub, without the response that it would come with."""
    return kind.__new__(kind, "refused")


def test_a_folder_is_not_looked_up(hub, tmp_path):
    asked = hub(ConnectionError("no network"))
    check_source(tmp_path, "--target")
    assert asked == []


@pytest.mark.parametrize("name", ["./nothing", "/nothing/at/all", "a/b/c", "nothing/", ""])
def test_a_path_is_not_looked_up(hub, name):
    asked = hub()
    with pytest.raises(ValueError, match=r"--drafter must be a folder or a Hub name, got .* no such folder\."):
        check_source(name, "--drafter")
    assert asked == []


def test_a_mistyped_folder_is_guessed(hub, tmp_path):
    (tmp_path / "my-drafter").mkdir()
    with pytest.raises(ValueError, match=r"Did you mean '.*my-drafter'\?"):
        check_source(tmp_path / "my-drafer", "--drafter")


def test_only_a_drafters_name_can_be_recycling(hub, tmp_path, monkeypatch):
    hub(refused(RepositoryNotFoundError))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"got 'recyling'.* Did you mean 'recycling'\?"):
        find_drafter("recyling")
    with pytest.raises(ValueError, match=r"got 'recyling'.*\(`hf auth login`\)\.$"):
        find_target("recyling")


@pytest.mark.parametrize("name", ["model_cards/tiny-domino", "model_cards/tiny-domno"])
def test_a_folder_of_the_clone_is_found_from_elsewhere(name, hub, tmp_path, monkeypatch):
    hub(refused(RepositoryNotFoundError))
    folder = tmp_path / "clone/model_cards/tiny-domino"
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    in_a_clone = r"model_cards/ is a folder of the repository, which pip does not install: run this in a clone\.$"
    monkeypatch.setattr(source, "CHECKOUT", tmp_path / "site-packages")
    with pytest.raises(ValueError, match=in_a_clone):
        check_source(name, "--drafter")
    monkeypatch.setattr(source, "CHECKOUT", tmp_path / "clone")
    with pytest.raises(ValueError, match=rf"Did you mean '{folder}'\?"):
        check_source(name, "--drafter")


def test_the_hub_is_asked_for_the_file_that_will_be_loaded(monkeypatch):
    asked = []
    monkeypatch.setattr(source, "get_hf_file_metadata", lambda url, **options: asked.append((url, options["token"])))
    check_source("somebody/something", "--drafter", revision="v1", subfolder="inside", token="secret")
    ((url, token),) = asked
    assert url.endswith("/somebody/something/resolve/v1/inside/config.json")
    assert token == "secret"


def test_a_name_that_was_downloaded_needs_no_hub(hub, monkeypatch):
    hub(ConnectionError("no network"))
    monkeypatch.setattr(source, "try_to_load_from_cache", lambda name, file: "config.json")
    check_source("Qwen/Qwen3-0.6B", "--target")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refused(RepositoryNotFoundError), "the Hub does not have it, or does not show it to you"),
        (ConnectionError("no network"), r"the Hub does not answer \(no network\)"),
    ],
)
def test_names_that_cannot_be_loaded_are_refused(hub, error, message):
    hub(error)
    with pytest.raises(ValueError, match=message):
        check_source("nobody/nothing", "--target")


@pytest.mark.parametrize("kind", [GatedRepoError, EntryNotFoundError, HfHubHTTPError])
def test_what_else_the_hub_says_is_left_to_loading(hub, kind):
    hub(refused(kind))
    check_source("somebody/something", "--target")


def test_a_drafter_is_no_target(tiny_pair_folder):
    drafter = tiny_pair_folder.with_name("tiny-domino")
    with pytest.raises(ValueError, match=r"--target must be a target, got .*Were target and drafter swapped\?"):
        load_pair(drafter, tiny_pair_folder)


def test_hub_names_keep_their_separator_where_paths_have_another(tiny_pair_folder, monkeypatch):
    """As on Windows, whose paths are written with backslashes."""

    class Backslashes(type(Path())):
        def __str__(self):
            return super().__str__().replace("/", "\\")

        def __fspath__(self):
            return super().__str__()

    asked = []

    def recorded(load):
        def from_pretrained(name, **options):
            asked.append(name)
            return load(tiny_pair_folder, **options)

        return from_pretrained

    monkeypatch.setattr(pairs, "Path", Backslashes)
    monkeypatch.setattr(pairs, "check_source", lambda *args, **options: None)
    monkeypatch.setattr(pairs, "check_is_target", lambda *args, **options: None)
    for loader in (pairs.AutoTokenizer, pairs.AutoTarget):
        monkeypatch.setattr(loader, "from_pretrained", recorded(loader.from_pretrained))
    assert load_pair("house/tiny", "recycling").name == "tiny"
    assert asked == ["house/tiny"] * 2

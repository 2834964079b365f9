"""The list of released drafters: whole, sorted, and read by the commands without a network."""

from __future__ import annotations

import json

import pytest

from hf_domino import DominoConfig
from hf_domino.cli.main import main
from hf_domino.formats import source
from hf_domino.publishing import released
from hf_domino.publishing.released import FILE, known_drafters, read_released


def test_every_line_names_a_method_and_a_target_once():
    known = released()
    assert len(known) == len({(one.target, one.drafter) for one in known}) > 20
    assert [one.billions for one in known] == sorted(one.billions for one in known)
    for one in known:
        assert DominoConfig.of_method(one.method).projector_type == one.method


def test_names_of_targets_are_those_of_the_hub_in_any_case():
    assert released("qwen/qwen3-4b") == released("Qwen/Qwen3-4B") != []
    assert released("nobody/nothing") == []
    assert known_drafters("nobody/nothing") is None
    assert "Huang2020/Qwen3-8B-Domino-b16 (layout tested)" in str(known_drafters("Qwen/Qwen3-8B"))


def test_drafters_of_a_clone_are_named_by_paths_that_hold(tmp_path, monkeypatch):
    target = "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    name = "model_cards/qwen2.5-coder-0.5b-instruct-domino"
    (tmp_path / "clone" / name).mkdir(parents=True)
    monkeypatch.setattr(source, "CHECKOUT", tmp_path / "clone")
    monkeypatch.chdir(tmp_path / "clone")
    assert f": {name} (run by us). Try one with --drafter NAME." in str(known_drafters(target))
    monkeypatch.chdir(tmp_path)
    assert str(known_drafters(target)).endswith(f": {tmp_path}/clone/{name} (run by us). Try one with --drafter NAME.")
    monkeypatch.setattr(source, "CHECKOUT", tmp_path / "site-packages")
    line = str(known_drafters(target))
    assert f": {name} (run by us)" in line
    assert line.endswith("which pip does not install: run this in a clone.")
    assert "clone" not in str(known_drafters("Qwen/Qwen3-8B"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mark": "perfect"}, "mark in .* line 1 must be one of run by us, layout tested, not tried, got 'perfect'"),
        ({"target": None}, "target in .* line 1 must be a text, got None"),
        ({"speed": 3}, r"line 1 must be with the fields .* got \['speed'\]"),
    ],
)
def test_wrong_lines_are_named(change, message, tmp_path):
    line = json.loads(FILE.read_text().splitlines()[0]) | change
    path = tmp_path / "released.jsonl"
    path.write_text(json.dumps(line))
    with pytest.raises(ValueError, match=message):
        read_released(path)


def test_a_line_that_is_no_object_is_named(tmp_path):
    path = tmp_path / "released.jsonl"
    path.write_text(FILE.read_text().splitlines()[0] + "\n[1]\n")
    with pytest.raises(ValueError, match="line 2 must be a JSON object"):
        read_released(path)


def test_find_needs_no_network_for_a_known_target(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("hf_domino.publishing.hub.HfApi.model_info", fail)
    assert main(["find", "Qwen/Qwen3-8B"]) == 0
    said = capsys.readouterr()
    assert "Huang2020/Qwen3-8B-Domino-b16" in said.out
    assert "no network" in said.err
    assert main(["find", "nobody/nothing"]) == 2

"""Pipelines of two names: from a cache without network, and refused where mistyped."""

from __future__ import annotations

import huggingface_hub
import pytest
import torch
import transformers

import hf_domino
from hf_domino import DominoDraftModel

pytestmark = pytest.mark.transformers

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT, OPTIONS = "def f(a):", {"do_sample": False, "max_new_tokens": 16}


def pipeline(**names):
    """Transformers' own, by the name under which scripts have it."""
    return transformers.pipeline("text-generation", **names)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(saved_pair, tmp_path, monkeypatch):
    """A cache that holds both folders as downloads."""
    for name, folder in zip(("target", "drafter"), saved_pair, strict=True):
        repository = tmp_path / f"models--user--{name}"
        for part in ("refs", "snapshots"):
            (repository / part).mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        (repository / "snapshots" / COMMIT).symlink_to(folder)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))


def test_two_names_without_network(offline, cache, saved_pair):
    generator = pipeline(model="user/target", assistant_model="user/drafter")
    assert isinstance(generator.assistant_model, DominoDraftModel)
    assert generator(TEXT, **OPTIONS) == pipeline(model=str(saved_pair[0]))(TEXT, **OPTIONS)


def test_a_mistyped_drafter(saved_pair, tmp_path):
    """Said before anything is loaded: the target's folder is empty."""
    name = saved_pair[1].with_name(saved_pair[1].name + "x")
    with pytest.raises(ValueError, match=rf"assistant_model must be a folder or.*Did you mean '{saved_pair[1]}'\?"):
        pipeline(model=str(tmp_path), assistant_model=str(name))
    unpatched = transformers.pipeline.__wrapped__  # as scripts have it that imported it before hf_domino
    with pytest.raises(ValueError, match=rf"assistant_model must be a folder or.*Did you mean '{saved_pair[1]}'\?"):
        unpatched("text-generation", model=str(saved_pair[0]), assistant_model=str(name))


def test_not_cached_and_offline(offline, saved_pair):
    with pytest.raises(ValueError, match=r"'user/nothing'.*was not downloaded before, and .* offline mode is enabled"):
        pipeline(model=str(saved_pair[0]), assistant_model="user/nothing")


def test_a_drafter_is_no_model_to_generate_with(saved_pair):
    with pytest.raises(ValueError, match=r"model must be a target, got 'a drafter .*swapped\?"):
        pipeline(model=str(saved_pair[1]), assistant_model=str(saved_pair[0]))


def test_recycling_is_a_name_that_every_target_has(offline, saved_pair, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = pipeline(model=str(saved_pair[0]))
    generator = pipeline(model=str(saved_pair[0]), assistant_model="recycling")
    assert generator(TEXT, **OPTIONS) == plain(TEXT, **OPTIONS)
    assert generator.assistant_model.config.projector_type == "recycling"
    inputs = plain.tokenizer(TEXT, return_tensors="pt")
    expected = plain.model.generate(**inputs, **OPTIONS)
    for _ in range(2):
        assert torch.equal(plain.model.generate(**inputs, assistant_model="recycling", **OPTIONS), expected)
    hf_domino.attach(plain.model, "recycling")
    assert torch.equal(plain.model.generate(**inputs, **OPTIONS), expected)
    assert hf_domino.attached(plain.model).num_drafted == 1
    (tmp_path / "recycling").mkdir()  # a folder of that name is the folder
    with pytest.raises(ValueError, match="recycling"):
        plain.model.generate(**inputs, assistant_model="recycling", **OPTIONS)

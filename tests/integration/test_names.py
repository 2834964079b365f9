"""Pipelines of two names: from a cache without network, with what the Hub wants, and refused at once where mistyped."""

from __future__ import annotations

import huggingface_hub
import pytest
import transformers
from huggingface_hub.errors import RepositoryNotFoundError

from hf_domino import DominoDraftModel
from hf_domino.formats import source

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT, OPTIONS = "def f(a):", {"do_sample": False, "max_new_tokens": 16}


def pipeline(**names):
    """Transformers' own, by the name under which scripts have it."""
    return transformers.pipeline("text-generation", **names)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(saved_pair, tmp_path):
    """A cache that holds both folders as downloads."""
    for name, folder in zip(("target", "drafter"), saved_pair, strict=True):
        repository = tmp_path / f"models--user--{name}"
        for part in ("refs", "snapshots"):
            (repository / part).mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        (repository / "snapshots" / COMMIT).symlink_to(folder)
    return str(tmp_path)


def test_two_names_without_network(offline, cache, saved_pair):
    places = {"model_kwargs": {"cache_dir": cache}}
    generator = pipeline(model="user/target", assistant_model="user/drafter", **places)
    assert isinstance(generator.assistant_model, DominoDraftModel)
    assert generator(TEXT, **OPTIONS) == pipeline(model=str(saved_pair[0]))(TEXT, **OPTIONS)


def test_what_is_the_targets_and_what_is_for_all(offline, cache, saved_pair, monkeypatch):
    given, load = {}, DominoDraftModel.from_pretrained

    def spy(name, **kwargs):
        given.update(kwargs)
        return load(name, **kwargs)

    monkeypatch.setattr(DominoDraftModel, "from_pretrained", spy)
    places = {
        "revision": COMMIT,
        "token": "secret",
        "model_kwargs": {"cache_dir": cache, "attn_implementation": "sdpa"},
    }
    pipeline(model=str(saved_pair[0]), assistant_model="user/drafter", **places)
    assert (given["token"], given["cache_dir"]) == ("secret", cache)
    assert not given.keys() & {"revision", "attn_implementation"}


def test_models_that_cannot_be_remembered_are_loaded():
    class Odd:
        """Neither hashable nor weakly referenced, as models of others may be."""

        __slots__, __hash__ = (), None

    model = Odd()
    assert transformers.pipelines.load_model(model, None) is model


def test_a_mistyped_drafter(saved_pair, tmp_path):
    """Said before anything is loaded: the target's folder is empty."""
    name = saved_pair[1].with_name(saved_pair[1].name + "x")
    with pytest.raises(ValueError, match=rf"assistant_model must be a folder or.*Did you mean '{saved_pair[1]}'\?"):
        pipeline(model=str(tmp_path), assistant_model=str(name))
    unpatched = transformers.pipeline.__wrapped__  # as scripts have it that imported it before hf_domino
    with pytest.raises(ValueError, match=rf"assistant_model must be a folder or.*Did you mean '{saved_pair[1]}'\?"):
        unpatched("text-generation", model=str(saved_pair[0]), assistant_model=str(name))


def test_a_mistyped_target(saved_pair, monkeypatch):
    def unknown(url, **options):
        raise RepositoryNotFoundError.__new__(RepositoryNotFoundError, "refused")

    monkeypatch.setattr(source, "get_hf_file_metadata", unknown)
    with pytest.raises(ValueError, match=r"^model must be .* got 'user/tarqet'.*the Hub does not know it, or not for"):
        pipeline(model="user/tarqet", assistant_model=str(saved_pair[1]))


def test_not_cached_and_offline(offline, saved_pair):
    with pytest.raises(ValueError, match=r"'user/nothing'.*was not downloaded before, and .* offline mode is enabled"):
        pipeline(model=str(saved_pair[0]), assistant_model="user/nothing")


def test_a_drafter_is_no_model_to_generate_with(saved_pair):
    with pytest.raises(ValueError, match=r"model of the pipeline must be the target.*and assistant_model='.*'\."):
        pipeline(model=str(saved_pair[1]))

"""Registration: a string is handed over, whatever happens there is no error, and nothing heavy is imported."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from stand_in import install

from hf_domino.serving.plugin import ARCHITECTURE, MODEL, register

ROOT = Path(__file__).parents[2]


class Registry:
    def __init__(self, error=None):
        self.known, self.error = {}, error

    def register_model(self, name, model):
        if self.error:
            raise self.error
        self.known[name] = model


@pytest.fixture
def found(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(name=name))


def test_our_model_takes_the_place_by_name(monkeypatch, found):
    install(monkeypatch, ModelRegistry=(registry := Registry()))
    register()
    register()
    assert registry.known == {"DFlashDraftModel": MODEL} == {ARCHITECTURE: MODEL}
    assert "hf_domino.serving.vllm_model" not in sys.modules


@pytest.mark.parametrize("error", [TypeError("no"), ImportError("no")])
def test_it_never_raises(monkeypatch, found, caplog, error):
    install(monkeypatch, ModelRegistry=Registry(error))
    with caplog.at_level(logging.WARNING):
        register()
    assert f"{type(error).__name__}: no" in caplog.text


def test_a_vllm_without_the_base_keeps_its_own(monkeypatch, caplog):
    install(monkeypatch, ModelRegistry=(registry := Registry()))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    register()
    assert registry.known == {}
    assert "qwen3_dflash" in caplog.text


def test_without_vllm(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    register()
    assert "hf_domino serves no Domino drafters here" in caplog.text


def test_the_entry_point_is_light():
    (line,) = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if "serving.plugin" in line]
    module, _, name = line.partition('"')[2].strip('"').partition(":")
    script = f"import sys, {module} as m; m.{name}; print({{'torch', 'transformers', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

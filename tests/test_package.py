"""The package itself: names and modules come when they are asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import hf_domino


def test_modules_are_attributes():
    assert hf_domino.training is importlib.import_module("hf_domino.training")


@pytest.mark.slow
def test_a_configuration_is_made_wherever_its_class_is_imported_from():
    script = "from hf_domino.configuration.domino_config import DominoConfig; print(type(DominoConfig()).__name__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "DominoMethodConfig"


def test_other_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'DominoDraftModels'"):
        hf_domino.DominoDraftModels  # noqa: B018
    assert not hasattr(hf_domino, "__wrapped__")


def test_what_a_module_lacks_is_not_hidden(monkeypatch, tmp_path):
    """A dependency that is missing is named, not turned into an attribute that is missing."""
    (tmp_path / "incomplete.py").write_text("import a_package_that_is_not_there")
    monkeypatch.setattr(hf_domino, "__path__", [*hf_domino.__path__, str(tmp_path)])
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        hf_domino.incomplete  # noqa: B018

"""The package itself: names and modules come when they are asked for."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import hf_domino

ROOT = Path(__file__).parents[1]


def test_modules_are_attributes():
    assert hf_domino.training is importlib.import_module("hf_domino.training")


@pytest.mark.slow
@pytest.mark.parametrize(
    "made", ["DominoConfig()", "DominoConfig.from_dict({'gru_hidden_dim': 64}, projector_type='dflash')"]
)
def test_a_configuration_is_made_wherever_its_class_is_imported_from(made):
    script = f"from hf_domino.configuration.domino_config import DominoConfig; print({made}.projector_type)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ("dflash" if "dflash" in made else "domino")


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


def test_the_oldest_python_can_install_what_the_readme_installs():
    """Every pin of constraints.txt takes it, and all that name it name the same."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = project["project"]["requires-python"].removeprefix(">=")
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)
    refused = []
    for name, version in pins:
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # only some of the extras are installed
            continue
        asks = found.metadata["Requires-Python"] or ""
        if found.version.partition("+")[0] == version and not SpecifierSet(asks).contains(oldest):
            refused.append((name, asks))
    assert refused == []
    assert f"You need Python {oldest} or newer" in (ROOT / "README.md").read_text()
    assert f"Programming Language :: Python :: {oldest}" in project["project"]["classifiers"]
    assert project["tool"]["mypy"]["python_version"] == oldest
    assert project["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"

"""The workshop beside the models, as its command is called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import commands
from recipes.command import RECIPES

WORKSHOP = Path(__file__).parents[2] / "model_cards" / "workshop"


def workshop(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """What `python model_cards/workshop` does."""
    return subprocess.run([sys.executable, str(WORKSHOP), *arguments], cwd=cwd, capture_output=True, text=True)


def test_a_recipe_alone_lists_what_there_is_and_one_without_its_folder_is_refused(tmp_path):
    done = workshop("recipe", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == list(RECIPES)
    done = workshop("recipe", "pair", cwd=tmp_path)
    assert done.returncode == 2
    assert "python model_cards/workshop recipe: --output must be given" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_command_has_help(capsys):
    for name in commands.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            commands.main([name, "--help"])
        assert ended.value.code == 0
        assert "examples:" in capsys.readouterr().out

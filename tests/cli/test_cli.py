from __future__ import annotations

import subprocess
import sys

import pytest

from hf_domino.cli import main as cli


def stub(run):
    """A subcommand's module."""
    return type("Stub", (), {"add_arguments": staticmethod(lambda parser: None), "run": staticmethod(run)})


@pytest.fixture
def command(monkeypatch):
    """Put a function in the place of every subcommand."""

    def replace(run):
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: stub(run))

    return replace


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_exit_codes_of_commands(command, returned, code):
    command(lambda options: returned)
    assert cli.main(["demo"]) == code


def failing(error):
    def run(options):
        raise error

    return run


def test_user_errors_show_no_traceback(command, capsys):
    command(failing(FileNotFoundError("no pair at here")))
    assert cli.main(["demo"]) == cli.USER_ERROR
    assert capsys.readouterr().err == "hf-domino demo: no pair at here\n"


def test_traceback_on_request(command):
    command(failing(ValueError("wrong")))
    with pytest.raises(ValueError, match="wrong"):
        cli.main(["bench", "--traceback"])


def test_bugs_keep_their_traceback(command):
    command(failing(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["demo"])


def test_interrupt(command):
    command(failing(KeyboardInterrupt()))
    assert cli.main(["demo"]) == cli.INTERRUPTED


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == 0
    assert "--traceback" in capsys.readouterr().out


def test_help_lists_the_commands():
    done = subprocess.run([sys.executable, "-m", "hf_domino.cli", "--help"], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in cli.COMMANDS)


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["nothing"])
    assert exit_.value.code == cli.USER_ERROR
    assert "invalid choice" in capsys.readouterr().err

from __future__ import annotations

import dataclasses
import errno
import getpass
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import hf_domino
from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino.cli import check, flags, train
from hf_domino.cli import main as cli
from hf_domino.evaluation.benchmark import options
from hf_domino.evaluation.check import MAX_NEW_TOKENS, verdict
from hf_domino.formats import engines, exporting
from hf_domino.pair import finding as pair


def stub(run):
    """A subcommand's module."""
    fields = {"EXAMPLES": "", "add_arguments": staticmethod(lambda parser: None), "run": staticmethod(run)}
    return type("Stub", (), fields)


@pytest.fixture
def command(monkeypatch):
    """Put a function in the place of every subcommand."""

    def replace(run):
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: stub(run))

    return replace


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1)])
def test_exit_codes_of_commands(command, returned, code):
    command(lambda options: returned)
    assert cli.main(["env"]) == code


def failing(error):
    def run(options):
        raise error

    return run


def test_user_errors_show_no_traceback(command, capsys):
    command(failing(FileNotFoundError("no pair at here")))
    assert cli.main(["env"]) == cli.USER_ERROR
    assert capsys.readouterr().err == "hf-domino env: no pair at here\n"


def test_traceback_on_request(command):
    command(failing(ValueError("wrong")))
    with pytest.raises(ValueError, match="wrong"):
        cli.main(["bench", "--traceback"])


def test_bugs_keep_their_traceback(command):
    command(failing(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["env"])


@pytest.mark.parametrize("reason", ["is a file", "is read-only here"])
@pytest.mark.parametrize(
    ("command", "flag", "name"),
    [
        ("bench --drafter nowhere/drafter", "the folder of --rows", "rows.jsonl"),
        ("data --target nowhere/target", "--output", ""),
        ("export --drafter nowhere/drafter", "--output", ""),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_named_before_any_work(
    command, flag, name, reason, tmp_path, monkeypatch, capsys
):
    place = tmp_path / "place"
    if reason == "is a file":
        place.touch()
    else:  # the system's answer of a read-only disk, and of somebody else's folder
        place.mkdir()
        monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).is_relative_to(place))
    folder = place / "below"
    assert cli.main([*command.split(), flag.split()[-1], str(folder / name)]) == cli.USER_ERROR
    said = capsys.readouterr().err
    assert f"{flag} must be a folder that can be written to, got '{folder}'. Choose another: {place} {reason}." in said


def test_what_the_system_refuses_is_said_without_its_number(command, capsys):
    command(failing(PermissionError(errno.EACCES, "Permission denied", "/etc/shadow")))
    assert cli.main(["env"]) == cli.USER_ERROR
    said = "/etc/shadow cannot be used: Permission denied. Name another place, or free that one."
    assert capsys.readouterr().err == f"hf-domino env: {said}\n"


def test_interrupt(command):
    command(failing(KeyboardInterrupt()))
    assert cli.main(["env"]) == cli.INTERRUPTED


def test_interrupt_while_a_command_is_imported(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["env"]) == cli.INTERRUPTED


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert f"examples:\n  hf-domino {name}" in shown
    flags = re.findall(r"^  (?:-h, )?(--[\w-]+)", shown, re.MULTILINE)
    assert len(flags) == len(set(flags)) > 1
    assert [flag for flag in re.findall(r"--\w[\w-]*", shown) if "_" in flag] == []


LIGHT = """
import contextlib, io, sys
from hf_domino.cli.main import COMMANDS, main
shown = io.StringIO()
for arguments in (["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
        main(arguments)
assert all(name in shown.getvalue() for name in COMMANDS)
print({"torch", "transformers", "numpy", "rich", "huggingface_hub"} & set(sys.modules))
"""


def test_help_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_all_fields_of_training_are_shown_once_on_request(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["train", "--help-all"])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    names = [field.name for owner in train._groups() for field in dataclasses.fields(owner) if field.init]
    listed = [flag.replace("-", "_") for flag in re.findall(r"^  (?:-h, )?--([\w-]+)", shown, re.MULTILINE)]
    assert [name for name in names if listed.count(name) != 1] == []
    assert shown.index("--target ") < shown.index("--num-anchors ") < shown.index("--adam-beta1 ")
    assert "Most blocks trained per sequence and step. (default: 256)" in " ".join(shown.split())


def test_what_help_of_training_says_of_transformers_is_there():
    assert set(train.FROM_TRANSFORMERS) < {field.name for field in dataclasses.fields(train._groups()[-1])}


def test_a_plan_from_numbers_needs_no_torch():
    script = "import sys; from hf_domino.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    arguments = ["plan", "--alpha", "0.8", "--t-plain", "10", "--t-verify", "12.9", "--t-draft", "1.6"]
    subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, check=True)


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"hf-domino {hf_domino.__version__}\n"


@pytest.mark.parametrize("command", ["chat", "bench", "data --target t --output o", "export --drafter d --output o"])
def test_a_dtype_may_be_written_short(command):
    for written, name in (("fp32", "float32"), ("bf16", "bfloat16"), ("half", "float16")):
        assert cli.parse([*command.split(), "--dtype", written]).dtype == name


def test_choices_are_what_they_stand_for():
    assert tuple(exporting.FORMATS) == flags.FORMATS
    assert tuple(engines.ENGINES) == flags.ENGINES
    assert set(check.EXIT_CODES) == {verdict.FITS, verdict.DOES_NOT_FIT, verdict.TOO_FEW}
    assert cli.parse(["check"]).max_new_tokens == MAX_NEW_TOKENS


@pytest.mark.parametrize("name", ["check", "bench", "data"])
def test_help_says_which_fields_hold_a_prompt(name, capsys):
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    assert f"with {PROMPT_FIELDS}" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("page", ["data", "speed", "training"])
def test_documents_say_which_fields_hold_a_prompt(page):
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    assert f"records with {PROMPT_FIELDS}" in " ".join(text.split())


def test_unknown_flag_shows_the_usage_of_its_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["check", "--targt", "x"])
    assert exit_.value.code == cli.USER_ERROR
    shown = capsys.readouterr().err
    assert shown.startswith("usage: hf-domino check")
    assert "unrecognized arguments: --targt x; --targt: did you mean --target?" in shown


@pytest.mark.parametrize(
    "command",
    [
        "generate word", "chat", "check", "bench", "data --target pycoder-13m --output out",
        "train --target pycoder-13m --train_file t.txt --output_dir out",
        "export --drafter pycoder-13m --output out", "check --drafter pycoder-13m --target tiny",
        "bench --twin pycoder-13m --target tiny",
        "train --target tiny --drafter pycoder-13m --train_file t.txt --output_dir out",
        "export --target pycoder-13m --drafter tiny-domino --output out",
    ],
)  # fmt: skip
def test_every_command_takes_the_bundled_pair_by_its_name(command, tiny_pair_folder, tmp_path, monkeypatch, capsys):
    for name in ("tiny", "tiny-domino"):
        (tmp_path / name).symlink_to(tiny_pair_folder.with_name(name))
    (tmp_path / "t.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pair, "__file__", str(tmp_path / "site-packages/hf_domino/pair/finding.py"))  # no checkout
    assert cli.main(command.split()) == cli.USER_ERROR
    assert "no pair at " in capsys.readouterr().err  # and not sought on the Hub
    assert not (tmp_path / "out").exists()


def test_flags_may_be_spelled_with_either_mark():
    assert cli.parse(["data", "--target", "t", "--output", "o", "--eval_rows", "4"]).eval_rows == 4
    assert cli.parse(["bench", "--num_prompts=3"]).num_prompts == 3
    assert cli.parse(["train", "--max-train-rows", "4", "--train-file", "t"]).max_train_rows == 4
    assert cli.parse(["train", "--max_train_rows=4", "--train_dataset", "t"]).train_file == "t"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("bnch --rows r", "bnch: did you mean bench?"),
        ("--versoin", "--versoin: did you mean --version?"),
        ("data --targt x", "--targt: did you mean --target?"),  # of what is required, too
        ("train --leraning_rate=3", "--leraning_rate=3: did you mean --learning-rate?"),
        ("generate --sed 3", "--sed: did you mean --seed?"),
    ],
)
def test_a_typo_gets_a_suggestion(typed, meant, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(typed.split())
    assert exit_.value.code == cli.USER_ERROR
    assert capsys.readouterr().err.endswith(f"; {meant}\n")


@pytest.mark.parametrize("width", ["60", "80", "100"])
def test_help_breaks_no_name(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", width)
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    words = set(re.split(r"[\s,;]+", capsys.readouterr().out))
    assert {*options.MEASURABLE, "NAME-domino", "--target-revision", "(default:"} <= words


def test_environment_tells_versions_and_nothing_private(capsys):
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert torch.__version__ in found["PyTorch version (accelerator?)"]
    assert found["`transformers` version"] == transformers.__version__
    assert found["hf-domino"] == hf_domino.__version__
    assert not {str(Path.home()), getpass.getuser(), platform.node()} & set(found.values())
    assert cli.main(["env"]) == 0
    assert not re.search(r"(^|\s)(/|~)\w", capsys.readouterr().out)


def test_without_a_command_help_is_shown(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([])
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"    {name} " in shown or f"    {name}\n" in shown for name in cli.COMMANDS)


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["nothing"])
    assert exit_.value.code == cli.USER_ERROR
    assert "invalid choice" in capsys.readouterr().err

from __future__ import annotations

import dataclasses
import errno
import io
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hf_domino import pair
from hf_domino._common.errors import invalid_argument, is_own
from hf_domino._common.fields import PROMPT_FIELDS
from hf_domino.cli import check, flags, train
from hf_domino.cli import main as cli
from hf_domino.evaluation.check import MAX_NEW_TOKENS, verdict
from hf_domino.formats import engines, registry, source


@pytest.fixture
def command(monkeypatch):
    """Put a function in the place of every subcommand, which is given or raises."""

    def replace(outcome):
        def run(options):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        fields = {"EXAMPLES": "", "add_arguments": staticmethod(lambda parser: None), "run": staticmethod(run)}
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: type("Stub", (), fields))

    return replace


DENIED = "/etc/shadow cannot be used: Permission denied. Name another place, or free that one."


@pytest.mark.parametrize(
    ("outcome", "code", "said"),
    [
        (None, 0, ""),
        (1, 1, ""),
        (KeyboardInterrupt(), cli.INTERRUPTED, ""),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (invalid_argument("x", 1, 2, "Set it."), cli.USER_ERROR, "hf-domino find: x must be 1, got 2. Set it.\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/etc/shadow"),
            cli.USER_ERROR,
            f"hf-domino find: {DENIED}\n",
        ),
    ],
    ids=str,
)
def test_what_became_of_a_command_is_its_exit_code(outcome, code, said, command, capsys):
    command(outcome)
    assert cli.main(["find"]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_has_read_enough_ends_a_command_quietly(tmp_path):
    """As `| head` does."""
    (tmp_path / "printing.py").write_text(
        "EXAMPLES = ''\n\ndef add_arguments(parser):\n    pass\n\ndef run(options):\n    print('line')\n"
    )
    call = "import sys; from hf_domino.cli.main import main; sys.exit(main(['print'], {'print': ('printing', '')}))"
    read, write = os.pipe()
    os.close(read)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    ended = subprocess.run(
        [sys.executable, "-c", call], stdout=write, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize("words", [["abc \udcff"], ["-"]])
def test_a_prompt_of_other_bytes_than_utf_8_is_said(words, monkeypatch, capsys):
    for command in ("generate", "explain"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"abc \xff"), encoding="utf-8"))
        assert cli.main([command, *words]) == cli.USER_ERROR
        assert "must be a text in UTF-8, got 'other bytes'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "data --target t --output o"])
def test_a_system_message_of_other_bytes_than_utf_8_is_said(command, capsys):
    assert cli.main([*command.split(), "--system", "abc \udcff"]) == cli.USER_ERROR
    assert "--system must be a text in UTF-8, got 'other bytes'" in capsys.readouterr().err


def test_find_says_that_a_folder_is_not_on_the_hub(tmp_path, capsys):
    assert cli.main(["find", str(tmp_path)]) == cli.USER_ERROR
    assert f"TARGET must be OWNER/NAME on the Hub, got 'the folder {tmp_path}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "flags"),
    [
        (invalid_argument("x", 1, 2, "Set it."), ["--traceback"]),
        (RuntimeError("a bug"), []),
        *((kind("of a library"), []) for kind in (ValueError, OSError, ImportError)),
    ],
)
def test_bugs_and_errors_of_libraries_keep_their_traceback_and_others_have_one_on_request(error, flags, command):
    command(error)
    with pytest.raises(type(error), match=str(error)):
        cli.main(["bench", *flags])


def test_a_sentence_for_the_user_is_told_from_what_an_operation_raises():
    """Both in a module of the package: one is raised there, the other comes from Python itself."""
    module = types.ModuleType("hf_domino.example")
    exec("def said():\n    raise ValueError('say it')\n\n\ndef broke():\n    int('x')\n", vars(module))
    for function, expected in ((module.said, True), (module.broke, False), (lambda: pair.read_prompts("none"), True)):
        with pytest.raises(ValueError) as caught:
            function()
        assert is_own(caught.value) is expected


def ended(*words):
    """The exit code of a command line that is not run."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([*words])
    return exit_.value.code


def test_rows_in_a_folder_are_refused_by_its_name(tmp_path, capsys):
    assert cli.main(["bench", "--results", str(tmp_path)]) == cli.USER_ERROR
    assert f"--results must be a file, got '{tmp_path}'" in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["is a file", "is read-only here"])
@pytest.mark.parametrize(
    ("command", "flag", "name"),
    [
        ("bench --drafter nowhere/drafter", "the folder of --results", "rows.jsonl"),
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


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command(name, capsys):
    assert ended(name, "--help") == 0
    shown = capsys.readouterr().out
    assert f"examples:\n  hf-domino {name}" in shown
    flags = re.findall(r"^  (?:-h, )?(--[\w-]+)", shown, re.MULTILINE)
    assert len(flags) == len(set(flags)) > 1
    assert [flag for flag in re.findall(r"--\w[\w-]*", shown) if "_" in flag] == []
    assert "(default: False)" not in shown
    assert "(default: None)" not in shown
    assert not re.search(r"\(default: [^)]*\)\s+\(default", shown)
    assert (f"with {PROMPT_FIELDS}" in " ".join(shown.split())) == (name in ("check", "bench", "data"))


LIGHT = """
import contextlib, io, sys
from hf_domino.cli.main import COMMANDS, __version__, main
shown = io.StringIO()
for arguments in ([], ["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(shown):
        main(arguments)
assert all(shown.getvalue().count(f"\\n  {name} ") >= 2 for name in COMMANDS)
assert f"hf-domino {__version__}\\n" in shown.getvalue()
print({"torch", "transformers", "numpy", "rich", "huggingface_hub"} & set(sys.modules))
"""


def test_help_needs_no_torch():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def test_all_fields_of_training_are_flags_and_ours_are_shown(capsys):
    assert ended("train", "--help") == 0
    shown = capsys.readouterr().out
    groups = [[field.name for field in dataclasses.fields(owner) if field.init] for owner in train._groups()]
    listed = {flag.replace("-", "_") for flag in re.findall(r"^  (?:-h, )?--([\w-]+)", shown, re.MULTILINE)}
    owners = [owner for named in train.OWNERS.values() for owner in named]
    ours = {field.name for owner in owners for field in dataclasses.fields(owner)}
    assert {*groups[0], *groups[1], *groups[2], *train.FROM_TRANSFORMERS} < ours | {*train.FROM_TRANSFORMERS} < listed
    assert set(train.FROM_TRANSFORMERS) < set(groups[-1])
    assert shown.index("--target ") < shown.index("--num-anchors ") < shown.index("--output-dir ")
    assert "Train on at most this many blocks of each example in a step. (default: 256)" in " ".join(shown.split())
    assert cli.parse(["train", "--adam-beta1", "0.5"]).adam_beta1 == 0.5


@pytest.mark.parametrize("command", ["chat", "bench", "data --target t --output o", "export --drafter d --output o"])
def test_a_dtype_may_be_written_short(command):
    for written, name in (("fp32", "float32"), ("bf16", "bfloat16"), ("half", "float16")):
        assert cli.parse([*command.split(), "--dtype", written]).dtype == name


def test_choices_are_what_they_stand_for():
    assert tuple(registry.WRITTEN) == flags.FORMATS
    assert tuple(engines.ENGINES) == flags.ENGINE_NAMES
    assert set(check.EXIT_CODES) == {verdict.FITS, verdict.DOES_NOT_FIT, verdict.TOO_FEW}
    assert cli.parse(["check"]).max_new_tokens is None
    assert f"(default: {MAX_NEW_TOKENS})" in Path(check.__file__).read_text()


@pytest.mark.parametrize(
    "command",
    [
        "generate word", "chat", "check", "bench", "data --target pycoder-13m --output out",
        "train --target pycoder-13m --train_file t.jsonl --output_dir out",
        "export --drafter pycoder-13m --output out", "check --drafter pycoder-13m --target tiny",
        "train --target tiny --drafter pycoder-13m --train_file t.jsonl --output_dir out",
        "export --target pycoder-13m --drafter tiny-domino --output out",
    ],
)  # fmt: skip
def test_every_command_takes_the_bundled_pair_by_its_name(command, tiny_pair_folder, tmp_path, monkeypatch, capsys):
    for name in ("tiny", "tiny-domino"):
        (tmp_path / name).symlink_to(tiny_pair_folder.with_name(name))
    (tmp_path / "t.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "CHECKOUT", tmp_path / "site-packages")
    assert cli.main(command.split()) == cli.USER_ERROR
    assert "no pair at " in capsys.readouterr().err  # and not sought on the Hub
    assert not (tmp_path / "out").exists()


def test_flags_of_train_may_be_spelled_as_fields_are():
    for words in ("train --max-train-rows 4", "train --max_train_rows=4"):
        assert cli.parse(words.split()).max_train_rows == 4


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("nothing", "invalid choice: 'nothing'"),
        ("check --targt x", "unrecognized arguments: --targt x"),
        ("data --targt x", "the following arguments are required: --target"),
    ],
)
def test_a_typo_is_named(typed, said, capsys):
    assert ended(*typed.split()) == cli.USER_ERROR
    shown = capsys.readouterr().err
    assert shown.startswith("usage: hf-domino")
    assert said in shown


def test_the_commands_of_a_first_day_stand_apart(capsys):
    assert ended("--help") == 0
    first, more = capsys.readouterr().out.split("commands of a first day:")[1].split("more commands:")
    listed = [re.findall(r"^  (\w+) ", part, flags=re.MULTILINE) for part in (first, more)]
    assert listed[0] == ["generate", "chat", "bench", "check", "train"]
    assert sorted(listed[0] + listed[1]) == sorted(cli.COMMANDS)


def test_flags_may_have_another_name_than_their_field():
    found = cli.parse(["data", "--target", "t", "--output", "o", "--num-examples=4", "--num-eval-examples", "2"])
    assert (found.rows, found.eval_rows) == (4, 2)

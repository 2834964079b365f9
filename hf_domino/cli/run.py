"""`hf-domino run`: start a program in which every `generate` of a drafter's target uses the drafter."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from hf_domino._common.errors import invalid_argument

ISOLATING_FLAGS = ("-I", "-E", "-S")  # Python then reads no environment variables, or imports no `sitecustomize`
MOST_OF_A_LINE = 1024  # bytes of a script's first line

EXAMPLES = """\
  hf-domino run --drafter my-drafter python script.py
  hf-domino run --drafter my-drafter lm_eval run -a pretrained=my-target -t gsm8k
  hf-domino run --drafter my-drafter --log-calls transformers serve my-target
  hf-domino run --drafter my-drafter --memory texts.safetensors python script.py

The drafter's configuration records which model its target is. Other models generate as usual. With recycling, all
models draft.
In Python, use hf_domino.attach(target, drafter).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino run`."""
    add = parser.add_argument
    add("--drafter", required=True, help="folder or Hub name of the drafter, or recycling, which fits every target")
    add(
        "--memory",
        metavar="FILE",
        help="prompt lookup in the texts of earlier calls, which are read from FILE and saved there at the end; "
        "share FILE only with people who may know these texts, because the time of a call can reveal what it holds",
    )
    add("--log-calls", action="store_true", help="print the tokens and the speed of each call of generate")
    add("words", metavar="COMMAND", nargs=argparse.REMAINDER, help="the program to start, with its arguments")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino run`, which replaces this process with the command where the system can do that."""
    from hf_domino.formats.adapters import drafter_config
    from hf_domino.integration import patch
    from hf_domino.pair import find_drafter, is_recycling

    drafter = options.drafter
    if not is_recycling(drafter):
        drafter = find_drafter(drafter)
        drafter_config(drafter)  # raises an error if it is not a drafter
    words = options.words
    if words[:1] == ["--"]:  # as it is often written between a command's own flags and those of the program
        words = words[1:]
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    program = shutil.which(next(iter(words), ""), path=path)
    if program is None:
        remedy = "The command looks for it beside this Python, and then on the PATH."
        raise invalid_argument("COMMAND", "a program and its arguments", shlex.join(words), remedy)
    if (flag := _isolating_flag([*_interpreter_of(program), *words])) is not None:
        remedy = "With it, Python imports nothing that prepares the drafter; leave it out, or call hf_domino.attach."
        raise invalid_argument("Python's flags in COMMAND", f"none of {ISOLATING_FLAGS}", flag, remedy)
    memory = {}
    if options.memory is not None:
        memory["HF_DOMINO_MEMORY"] = _checked_memory(options.memory)
    startup = Path(patch.__file__).with_name("startup")
    if Path(drafter).is_dir():
        drafter = str(Path(drafter).absolute())
    level = "INFO" if options.log_calls else "WARNING"
    added = {
        "HF_DOMINO_DRAFTER": drafter,
        "HF_DOMINO_LEVEL": level,
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(startup), os.environ.get("PYTHONPATH")))),
    }
    environment = os.environ | added | memory
    if sys.platform == "win32":  # where `execve` starts another process, and this one would end before it
        return subprocess.run([program, *words[1:]], env=environment).returncode
    os.execve(program, words, environment)


def _interpreter_of(program: str) -> list[str]:
    """Return the words in the first line of a script, which name its interpreter; none for other programs."""
    with open(program, "rb") as file:
        line = file.readline(MOST_OF_A_LINE)
    if not line.startswith(b"#!"):
        return []
    return line[2:].decode(errors="replace").split()


def _isolating_flag(words: Sequence[str]) -> str | None:
    """Return the flag with which Python would ignore the `PYTHONPATH` or `sitecustomize`; None without one."""
    is_python = False
    others = iter(words)
    for word in others:
        if re.fullmatch(r"python[\d.]*(\.exe)?", Path(word).name):
            is_python = True
        elif is_python and word in ("-W", "-X", "--check-hash-based-pycs"):
            next(others, None)  # the flag's value
        elif is_python and not word.startswith("--") and (match := re.match(r"-[a-zA-Z]+", word)):
            # Letters after `c` and `m`, and after `W` and `X`, are values.
            letters = re.split("[cmWX]", match[0])[0]
            if found := [flag for flag in ISOLATING_FLAGS if flag[1] in letters]:
                return found[0]
            if re.search("[cm]", match[0]):
                return None
        elif is_python and not word.startswith("-"):
            return None  # the script; what follows are its own arguments
    return None


def _checked_memory(name: str) -> str:
    """Return the absolute path of a memory's file; raise an error if it holds something else or cannot be written."""
    from hf_domino._common.atomic_writes import check_writable
    from hf_domino.decoding.lookup_memory import LookupMemory

    path = Path(name).absolute()
    check_writable(path.parent, "--memory")
    if path.exists():
        LookupMemory.load(path)
    return str(path)

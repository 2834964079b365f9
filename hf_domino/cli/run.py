"""`hf-domino run`: start a program in which every `generate` of a drafter's target uses the drafter."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from pathlib import Path

from hf_domino._common.errors import invalid_argument

EXAMPLES = """\
  hf-domino run --drafter my-drafter python script.py
  hf-domino run --drafter my-drafter lm_eval run -a pretrained=my-target -t gsm8k
  hf-domino run --drafter my-drafter --log-calls transformers serve my-target

The drafter's configuration records which model its target is. Other models generate as usual.
In Python, use hf_domino.attach(target, drafter).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino run`."""
    add = parser.add_argument
    add("--drafter", required=True, help="folder or Hub name of the drafter")
    add("--log-calls", action="store_true", help="print the tokens and the speed of each call of generate")
    add("words", metavar="COMMAND", nargs=argparse.REMAINDER, help="the program to start, with its arguments")


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino run`, which replaces this process with the command."""
    from hf_domino.formats.adapters import drafter_config
    from hf_domino.integration import patch
    from hf_domino.pair import find_drafter

    drafter = find_drafter(options.drafter)
    drafter_config(drafter)  # raises an error if it is not a drafter
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    program = shutil.which(next(iter(options.words), ""), path=path)
    if program is None:
        remedy = "The command looks for it beside this Python, and then on the PATH."
        raise invalid_argument("COMMAND", "a program and its arguments", shlex.join(options.words), remedy)
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
    os.execve(program, options.words, os.environ | added)

"""`hf-domino find`: list the drafters on the Hub for a target, and say which of them load."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hf_domino._common.errors import invalid_argument
from hf_domino.cli.flags import positive_int, set_up

if TYPE_CHECKING:
    from hf_domino.publishing import FoundDrafter

EXAMPLES = """\
  hf-domino find Qwen/Qwen3-8B
  hf-domino find Qwen/Qwen3-8B --limit 5
"""
RECYCLE = "Token recycling needs no training: hf-domino chat --target MODEL --drafter recycling"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino find`."""
    parser.add_argument("target", metavar="TARGET", help="OWNER/NAME of the target on the Hub")
    parser.add_argument(
        "--limit",
        type=positive_int,
        default=20,
        help="number of repositories to look into, from the most downloaded one on",
    )


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino find`."""
    from hf_domino.publishing import find
    from hf_domino.publishing.released import known_drafters

    set_up()
    line = known_drafters(options.target)
    if line:
        print(f"{line}\n")
    if Path(options.target).is_dir():
        if not line:
            remedy = "If it is a copy of a model, give that model's name."
            raise invalid_argument("TARGET", "OWNER/NAME on the Hub", f"the folder {options.target}", remedy)
        return
    try:
        found = find(options.target, limit=options.limit)
    except OSError as error:
        if not line:
            print(RECYCLE, file=sys.stderr)
            raise
        print(f"The Hub was not searched: {error}", file=sys.stderr)
        return
    if not found:
        print(f"The Hub has no drafter that names {options.target} by its base model, its tags or its own name.")
        print("You can train one: hf-domino train --help")
        print(RECYCLE)
    else:
        print("\n\n".join(map(_paragraph, found)))


def _paragraph(drafter: FoundDrafter) -> str:
    facts = [f"{drafter.downloads:,} downloads a month"]
    if drafter.last_modified:
        facts.append(f"changed {drafter.last_modified}")
    verdict = f"does not load: {drafter.refused}"
    if drafter.format:
        verdict = f"loads ({drafter.format})"
    lines = (f"{drafter.name}: {', '.join(facts)}", verdict, *drafter.usage)
    return "\n  ".join(lines)

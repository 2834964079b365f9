"""`hf-domino recipe`: make the bundled pair from nothing."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

EXAMPLES = """\
  hf-domino recipe --work pair-work --output model_cards
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino recipe`."""
    parser.add_argument("--output", type=Path, default=Path("model_cards"), help="folder the pair is written to")
    parser.add_argument("--work", type=Path, default=Path("pair-work"), help="folder for intermediate results")
    parser.add_argument("--packages", type=Path, help="folder with the corpus packages (default: install them)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes, one core each")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino recipe`."""
    from hf_domino.recipes.bundled import make_pair

    return make_pair(options, "hf_domino.cli")

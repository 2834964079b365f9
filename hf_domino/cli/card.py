"""`hf-domino card`: the card of a drafter's folder, from its configuration, rows and training; or check it."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from hf_domino._common.whole_files import check_writable
from hf_domino.cli.exits import FAILED_CHECK

EXAMPLES = """\
  hf-domino card my-drafter --target Qwen/Qwen3-0.6B --license apache-2.0
  hf-domino card my-drafter --rows rows.jsonl --dataset HuggingFaceH4/ultrachat_200k
  hf-domino card my-drafter --check
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino card`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the drafter's folder")
    parser.add_argument(
        "--rows", type=Path, help="rows of `hf-domino bench`, copied to FOLDER/results.jsonl if not there"
    )
    parser.add_argument("--target", help="its target on the Hub (default: as in the card, or in config.json)")
    parser.add_argument("--license", help="licence of the weights, such as apache-2.0")
    parser.add_argument("--dataset", action="append", help="data set on the Hub it was trained on; may be repeated")
    parser.add_argument("--output", type=Path, help="write the card to this file, and nothing else")
    parser.add_argument("--check", action="store_true", help="write nothing: does the card say what its rows do?")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino card`; returns 1 if a card that is checked does not fit."""
    from hf_domino.cards import UnfitCard
    from hf_domino.cards.sections import CARD
    from hf_domino.publishing.answers import check_name
    from hf_domino.publishing.folder_card import card_for, check_folder

    if options.check:
        try:
            check_folder(options.folder)
        except UnfitCard as error:
            print(error, file=sys.stderr)
            return FAILED_CHECK
        print(f"{options.folder / CARD} says what its rows do.")
        return 0
    given = {"license": options.license, "datasets": options.dataset}
    metadata = {field: value for field, value in given.items() if value}
    if options.target and not Path(options.target).exists():
        check_name(options.target, "--target")
    card = card_for(options.folder, options.rows, target=options.target, metadata=metadata)
    path = options.output or options.folder / CARD
    check_writable(path.parent, "the folder of the card")
    if options.rows and not options.output:
        _keep_rows(options.rows, options.folder)
    path.write_text(card, encoding="utf-8")
    print(path)
    return 0


def _keep_rows(rows: Path, folder: Path) -> None:
    """Put the rows beside the card, where they are looked for when it is checked."""
    from hf_domino.publishing.folder_card import ROWS

    kept = folder / ROWS
    if not kept.exists():
        shutil.copyfile(rows, kept)
    elif kept.read_bytes() != rows.read_bytes():
        raise ValueError(
            f"--rows must be those of {kept}, got others in {rows}: move {kept} away, or leave out --rows."
        )

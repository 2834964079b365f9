"""`hf-domino push`: write the card of a drafter's folder, and publish the folder on the Hub."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from difflib import unified_diff
from pathlib import Path
from typing import Any

from hf_domino._common.whole_files import check_writable
from hf_domino.cli.exits import FAILED_CHECK
from hf_domino.cli.flags import set_up

EXAMPLES = """\
  hf-domino push my-drafter --card-only --license apache-2.0
  hf-domino push my-drafter --card-only --dry-run
  hf-domino push my-drafter my-name/my-drafter --dry-run
  hf-domino push my-drafter my-name/my-drafter --private
  hf-domino push my-drafter their-name/their-drafter --create-pr --message "Drafter with twice the steps"

The card is computed from the folder's configuration, the rows of `hf-domino bench` in its results.jsonl, and what the
trainer recorded. The token is that of `hf auth login`, or of the environment's HF_TOKEN. It is no flag: command lines
are seen by other users of a machine, and kept in the shell's history. A push that broke off is resumed by the same
command.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino push`."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what save_pretrained or `hf-domino train` wrote")
    parser.add_argument("repo", metavar="REPO", nargs="?", help="OWNER/NAME on the Hub, made where there is none")
    add = parser.add_argument_group("card").add_argument
    add("--card-only", action="store_true", help="write FOLDER/README.md, and send nothing; no REPO is needed")
    add("--target", help="its target on the Hub (default: as in the card, or in config.json)")
    add("--license", help="licence of the weights, such as apache-2.0")
    add("--dataset", action="append", help="data set on the Hub it was trained on; may be repeated")
    parser.add_argument("--private", action="store_true", help="only its owner sees a new repository")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--create-pr", action="store_true", help="open a pull request in place of a push")
    where.add_argument("--revision", help="branch to push to, made where there is none (default: main)")
    parser.add_argument("--message", help="of the commit")
    dry_help = "list what would go, or with --card-only change; nothing is written, sent or asked"
    parser.add_argument("--dry-run", action="store_true", help=dry_help)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Run `hf-domino push`; returns 1 if a dry run finds that the card would change."""
    given = {"license": options.license, "datasets": options.dataset}
    card = {"target": options.target, "metadata": {field: value for field, value in given.items() if value}}
    if options.card_only:
        return _write_card(options.folder, card, options.dry_run)
    if options.repo is None:
        raise ValueError("REPO must be given, OWNER/NAME on the Hub, or --card-only.")
    from hf_domino.publishing import push

    set_up()
    flags = {name: getattr(options, name) for name in ("private", "create_pr", "revision", "message", "dry_run")}
    result = push(options.folder, options.repo, **flags, **card)
    if options.json:
        print(json.dumps(asdict(result)))
        return 0
    print(result)
    if result.commit is None:
        print("dry run: all checks passed, nothing was sent")
    else:
        print(f"{result.url}\ncommit {result.commit}")
        print(f'DominoDraftModel.from_pretrained("{result.repo_id}", revision="{result.commit}")')
    return 0


def _write_card(folder: Path, card: dict[str, Any], dry_run: bool) -> int:
    from hf_domino.cards.sections import CARD, read_text
    from hf_domino.publishing.folder_card import card_for

    check_writable(folder, "FOLDER")
    path, text = folder / CARD, card_for(folder, **card)
    if dry_run:
        changes = list(unified_diff(read_text(path).splitlines(), text.splitlines(), str(path), "as computed", n=0))
        print("\n".join(changes) or f"{path} is as computed.")
        return FAILED_CHECK if changes else 0
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0

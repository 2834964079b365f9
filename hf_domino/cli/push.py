"""`hf-domino push`: write the card of a drafter's folder, and publish the folder on the Hub."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hf_domino.cli.flags import set_up

EXAMPLES = """\
  hf-domino push my-drafter --card-only --license apache-2.0
  hf-domino push my-drafter my-name/my-drafter --dry-run
  hf-domino push my-drafter my-name/my-drafter --private

The card is computed from the folder's configuration, from run.json, in which the trainer recorded the training, and
from results.jsonl, which `hf-domino bench` wrote. Log in with `hf auth login`, or set HF_TOKEN. There is no flag for
the token, because other users of a machine can see command lines, and the shell keeps them. To resume an interrupted
push, run the same command again. For a branch or a pull request, write the card with --card-only and then use `hf
upload`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino push`."""
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, help="folder that save_pretrained or `hf-domino train` wrote"
    )
    parser.add_argument(
        "repo", metavar="REPO", nargs="?", help="OWNER/NAME on the Hub, which is created if it does not exist"
    )
    parser.add_argument("--target", help="Hub name of the target (default: the one in the card or in config.json)")
    parser.add_argument("--license", help="licence of the weights, such as apache-2.0")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--card-only", action="store_true", help="write FOLDER/README.md and send nothing; REPO is not needed")
    add("--dry-run", action="store_true", help="list the files that would be sent, without writing or sending anything")


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino push`."""
    from hf_domino.cards.sections import CARD
    from hf_domino.publishing.folder_card import card_for, missing_from
    from hf_domino.publishing.hub import push

    metadata = {"license": options.license} if options.license else {}
    card = {"target": options.target, "metadata": metadata}
    text = card_for(options.folder, **card)
    for missing in missing_from(text):
        print(missing, file=sys.stderr)
    if options.card_only:
        path = options.folder / CARD
        path.write_text(text, encoding="utf-8")
        print(path)
        return
    if options.repo is None:
        raise ValueError("REPO must be given, OWNER/NAME on the Hub, or --card-only.")
    set_up()
    result = push(options.folder, options.repo, private=options.private, dry_run=options.dry_run, **card)
    print(result)
    if result.commit is None:
        print("dry run: all checks passed, nothing was sent")
    else:
        print(f"{result.url}\ncommit {result.commit}")
        print(f'DominoDraftModel.from_pretrained("{result.repo_id}", revision="{result.commit}")')

"""`hf-domino push`: publish a drafter's folder on the Hub."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_domino.cli.flags import set_up

if TYPE_CHECKING:
    from hf_domino.publishing import PushResult

EXAMPLES = """\
  hf-domino push my-drafter my-name/my-drafter --dry-run
  hf-domino push my-drafter my-name/my-drafter --private
  hf-domino push my-drafter their-name/their-drafter --create-pr --message "Drafter with twice the steps"

The token is that of `hf auth login`, or of the environment's HF_TOKEN. It is no flag: command lines are seen by other
users of a machine, and kept in the shell's history. A push that broke off is resumed by the same command.
"""
UNFOUND = "The card has no base_model, by which drafters are found: hf-domino card {folder} --target OWNER/NAME."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `hf-domino push`."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="what save_pretrained or `hf-domino train` wrote")
    parser.add_argument("repo", metavar="REPO", help="OWNER/NAME on the Hub, made where there is none")
    parser.add_argument("--private", action="store_true", help="only its owner sees a new repository")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--create-pr", action="store_true", help="open a pull request in place of a push")
    where.add_argument("--revision", help="branch to push to, made where there is none (default: main)")
    parser.add_argument("--message", help="of the commit")
    parser.add_argument("--dry-run", action="store_true", help="check and list what would go; nothing is sent or asked")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> None:
    """Run `hf-domino push`."""
    from hf_domino.publishing.folder import plan_push
    from hf_domino.publishing.pushing import Destination, PushResult, send

    set_up()
    destination = Destination(options.repo, options.private, options.create_pr, options.revision, options.message)
    destination.check()
    plan = plan_push(options.folder, options.repo)
    if not options.json:
        print(f"{options.folder} to {options.repo}\n\n{plan}\n", flush=True)
    if plan.base_model is None:
        print(UNFOUND.format(folder=options.folder), file=sys.stderr)
    result = PushResult(options.repo, plan) if options.dry_run else send(plan, destination)
    if options.json:
        print(json.dumps(_to_dict(result)))
    else:
        print(_said(result))


def _said(result: PushResult) -> str:
    if result.commit is None:
        return "dry run: all checks passed, nothing was sent"
    where = result.pull_request or result.url
    load = f'DominoDraftModel.from_pretrained("{result.repo_id}", revision="{result.commit}")'
    return f"{where}\ncommit {result.commit}\n{load}"


def _to_dict(result: PushResult) -> dict[str, Any]:
    files = [{"path": file.path, "size": file.size, "large": file.is_large} for file in result.plan.files]
    return {
        "repo": result.repo_id,
        "files": files,
        "left_out": result.plan.left_out,
        "commit": result.commit,
        "url": result.url,
        "pull_request": result.pull_request,
    }

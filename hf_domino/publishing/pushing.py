"""A drafter's folder goes to the Hub: checked, planned, then sent as one commit by huggingface_hub's client.

Weights are uploaded first. The Hub keeps what has arrived, so a push that broke off is resumed by the same call.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo

from hf_domino import __version__
from hf_domino._common.refusal import refusal
from hf_domino.cards import merge_card
from hf_domino.cards.sections import read_text
from hf_domino.publishing.answers import LOG_IN, check_name, explained
from hf_domino.publishing.folder import CARD, PushPlan, plan_push

MAIN = "main"


@dataclass(frozen=True)
class PushResult:
    """What was pushed, or would be.

    Args:
        repo_id (`str`): Name on the Hub.
        plan ([`PushPlan`]): The files.
        commit (`str`, *optional*): Hash of the commit; None for a dry run.
        url (`str`, *optional*): Its address.
        pull_request (`str`, *optional*): Address of the pull request, if one was opened.
    """

    repo_id: str
    plan: PushPlan
    commit: str | None = None
    url: str | None = None
    pull_request: str | None = None


@dataclass(frozen=True)
class Destination:
    """Where a drafter goes, and how, in the words of [`push`]."""

    repo_id: str
    private: bool = False
    create_pr: bool = False
    revision: str | None = None
    message: str | None = None

    def check(self) -> None:
        """Refuse what cannot be, before anything is read or sent.

        Raises:
            ValueError: If the name is none, or a branch and a pull request are asked for together.
        """
        check_name(self.repo_id, "the repository's name")
        if self.create_pr and self.revision not in (None, MAIN):
            remedy = "A pull request is opened against the main branch; push to the branch, or leave it out."
            raise refusal("revision together with create_pr", f"None or {MAIN!r}", self.revision, remedy)


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    dry_run: bool = False,
    message: str | None = None,
) -> PushResult:
    """Publish a drafter's folder: weights, configuration, card and results, in one commit.

    A card that is on the Hub already is merged with the folder's. An upload that broke off is resumed by calling again.

    Args:
        folder (`str` or `Path`): What `save_pretrained` or a training wrote.
        repo_id (`str`): OWNER/NAME on the Hub; made where there is none.
        private (`bool`, *optional*, defaults to `False`): Whether only its owner sees a new repository.
        create_pr (`bool`, *optional*, defaults to `False`): Whether to open a pull request in place of a push.
        revision (`str`, *optional*): Branch to push to.
        token (`str` or `bool`, *optional*): Of the Hub; defaults to HF_TOKEN or the login.
        dry_run (`bool`, *optional*, defaults to `False`): Whether to check and plan only; nothing is asked of the Hub.
        message (`str`, *optional*): Of the commit.

    Raises:
        ValueError: If the folder holds no drafter that loads, its card does not fit its rows, a file holds a token, or
            the Hub does not take it.
    """
    destination = Destination(repo_id, private, create_pr, revision, message)
    destination.check()
    plan = plan_push(Path(folder), repo_id)
    return PushResult(repo_id, plan) if dry_run else send(plan, destination, token)


def send(plan: PushPlan, destination: Destination, token: str | bool | None = None) -> PushResult:
    """Send what was planned.

    Raises:
        ValueError: If the Hub does not take it.
    """
    repo_id = destination.repo_id
    if not isinstance(token, str) and not get_token():
        raise ValueError(f"pushing to {repo_id} needs a token, and nobody is logged in. {LOG_IN}")
    api = HfApi(token=token, library_name="hf_domino", library_version=__version__)
    with explained(repo_id, "pushing to"):
        there = _prepare(api, destination)
        contents = {file.path: file.source for file in plan.files}
        contents[CARD] = _merged_card(api, repo_id, there.sha, plan.card).encode()
        done = api.create_commit(
            repo_id,
            [CommitOperationAdd(path_in_repo=path, path_or_fileobj=source) for path, source in contents.items()],
            commit_message=destination.message or "Publish a drafter with hf_domino",
            revision=destination.revision,
            create_pr=destination.create_pr,
            parent_commit=there.sha,  # else a card that somebody edits meanwhile would be overwritten
        )
    return PushResult(repo_id, plan, done.oid, str(done.commit_url), done.pr_url)


def _prepare(api: HfApi, destination: Destination) -> ModelInfo:
    """Repository and branch as they are now; made where they are not there."""
    repo_id, revision = destination.repo_id, destination.revision
    try:
        there = api.model_info(repo_id)
    except RepositoryNotFoundError:
        api.create_repo(repo_id, private=destination.private or None)
        there = api.model_info(repo_id)
    if destination.private and not there.private:
        remedy = "Make it private in its settings on the Hub, or push to another name."
        raise ValueError(f"private must be False for {repo_id}, which is public already, got True. {remedy}")
    if revision in (None, MAIN):
        return there
    if not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.model_info(repo_id, revision=revision)


def _merged_card(api: HfApi, repo_id: str, commit: str | None, text: str) -> str:
    """Our card, merged with the one in the repository."""
    try:
        existing = api.hf_hub_download(repo_id, CARD, revision=commit)
    except RemoteEntryNotFoundError:  # not the error of a broken connection
        return text
    return merge_card(read_text(Path(existing)), text)

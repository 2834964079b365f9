"""Push drafters to the Hub, each in one commit of huggingface_hub's client, and find the drafters for a target there.

The output folder of a training also holds checkpoints, the optimizer's state, texts and logs, so this module lists the
files to push, not the files to leave out. Weights are uploaded first. The Hub keeps what has arrived, so the same call
resumes a push that was interrupted.

The Hub records which models are made from another one, but not that they draft for it. So the search combines the
target as base model with tags and words that are typical of drafters, and also looks for repositories with the target's
name. Their configurations show whether they are drafters.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError, RemoteEntryNotFoundError
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import filter_repo_objects, validate_repo_id
from transformers.utils import logging

from hf_domino._common.errors import invalid_argument
from hf_domino._common.version import __version__
from hf_domino.cards.render import is_hub_name
from hf_domino.cards.sections import CARD, merge_card, read_text
from hf_domino.formats.adapters import ADAPTER_FILES, BASE
from hf_domino.formats.loading import interpret
from hf_domino.formats.registry import format_of, refuse_others
from hf_domino.formats.source import ADAPTER_CONFIG, CONFIG, read_object
from hf_domino.methods import DominoDraftModel
from hf_domino.publishing.folder_card import card_for

PUBLISHED = [
    *(*ADAPTER_FILES, CARD, CONFIG, "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("results*.jsonl", "figures/*.svg", "figures/*.png", "LICENSE*", "NOTICE*"),
    *("custom_generate/*.py", "custom_generate/requirements.txt", "custom_generate/README.md"),
]
TAGS = ("speculative-decoding", "draft-model", "speculators", "domino", "dflash", "dspark", "eagle", "eagle3")
WORDS = ("domino", "dflash", "dspark", "draft", "speculator", "eagle", "mtp")  # that names of repositories have
MOST_OF_ONE_QUERY = 100  # repositories per query, the most downloaded first
THREADS = 8
CLIENT: dict[str, Any] = {"library_name": "hf_domino", "library_version": __version__}


@dataclass(frozen=True)
class PushResult:
    """What was pushed, or what a dry run would push."""

    repo_id: str
    files: dict[str, int]  # name -> bytes
    left_out: list[str]
    commit: str | None = None  # None after a dry run
    url: str | None = None  # address of the commit

    def __str__(self) -> str:
        width = max(map(len, self.files))
        files = [f"{name:<{width}}{size:>16,} bytes" for name, size in self.files.items()]
        return "\n".join([*files, f"left out: {', '.join(self.left_out) or 'nothing'}"])


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | bool | None = None,
    dry_run: bool = False,
    **card: Any,
) -> PushResult:
    """Publish a drafter's folder as OWNER/NAME on the Hub in one commit; the repository is created if there is none.

    The card is written anew from the folder, with the target and metadata of `card` as in [`card_for`], and merged with
    the card on the Hub. `private` makes a new repository private. `token` defaults to the one with which you are logged
    in. `dry_run` checks and lists the files without calling the Hub. A failure of the Hub or the connection raises an
    `OSError`, and a wrong folder or argument raises a `ValueError`.
    """
    folder = Path(folder)
    if "/" not in repo_id:
        raise invalid_argument(
            "the repository's name", "OWNER/NAME on the Hub", repo_id, "Example: my-name/my-drafter."
        )
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise invalid_argument("the repository's name", "OWNER/NAME on the Hub", repo_id, str(error)) from error
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_object(folder / ADAPTER_CONFIG).get(BASE)
        if not is_hub_name(base):
            remedy = "Push that drafter and name it there, or push one whole: load this folder and save_pretrained it."
            raise invalid_argument(
                f"{BASE} of {ADAPTER_CONFIG}", "a name on the Hub, where others find it", base, remedy
            )
    text = card_for(folder, name=repo_id, **card)
    going = _additions(folder, text.encode())
    names = {name.partition("/")[0] for name in going}
    planned = PushResult(
        repo_id,
        files={name: addition.upload_info.size for name, addition in going.items()},
        left_out=sorted(path.name for path in folder.iterdir() if path.name not in names),
    )
    if dry_run:
        return planned
    if token is None:
        token = True
    api = HfApi(token=token, **CLIENT)
    with _explained(f"pushing to {repo_id}"):
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        if private and not api.model_info(repo_id).private:
            raise invalid_argument(
                "private", f"False for {repo_id}, which is public already", True, "Push to another name."
            )
        there = api.model_info(repo_id).sha
        with suppress(RemoteEntryNotFoundError):  # a broken connection raises another error
            there_card = read_text(Path(api.hf_hub_download(repo_id, CARD, revision=there)))
            going[CARD] = CommitOperationAdd(CARD, merge_card(there_card, text).encode())
        done = api.create_commit(
            repo_id,
            going.values(),
            commit_message="Publish a drafter with hf_domino",
            parent_commit=there,  # so that a card that somebody edits in the meantime is not overwritten
        )
    return replace(planned, commit=done.oid, url=str(done.commit_url))


def _additions(folder: Path, card: bytes) -> dict[str, CommitOperationAdd]:
    """Collect the files to push by their names on the Hub, after checking that the drafter loads."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # hides Transformers' report of missing tensors, because the error names them
    device = None  # an adapter is merged, which needs the values of the weights
    if (folder / CONFIG).is_file():
        device = "meta"
    try:
        DominoDraftModel.from_pretrained(folder, device_map=device, local_files_only=True)
    finally:
        logging.set_verbosity(verbosity)
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    going = filter_repo_objects(names, allow_patterns=PUBLISHED)
    contents: dict[str, bytes | Path] = {name: folder / name for name in going} | {CARD: card}
    return {name: CommitOperationAdd(name, content) for name, content in sorted(contents.items())}


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn errors of the Hub and the connection into an `OSError`, which the command prints."""
    try:
        yield
    except RuntimeError as error:  # an upload failed
        raise OSError(f"{doing} broke off: {error} {error.__cause__} The same command sends the rest.") from error
    except (HTTPError, OSError) as error:  # an answer of the Hub, no connection, or offline mode
        raise OSError(f"{doing} failed: {' '.join(str(error).split())}") from error


@dataclass(frozen=True)
class FoundDrafter:
    """A repository that may have a drafter for the target, with the drafter's format or the reason why none loads."""

    name: str
    commit: str | None
    format: str | None  # None if it does not load
    refused: str | None  # why it does not load
    downloads: int  # in the last 30 days
    last_modified: str | None  # YYYY-MM-DD

    @property
    def usage(self) -> tuple[str, ...]:
        """The lines of code that use the drafter; none if it does not load."""
        if not self.format:
            return ()
        load = f'drafter = DominoDraftModel.from_pretrained("{self.name}")'
        return load, "target.generate(**inputs, assistant_model=drafter)"


def find(target: str, *, limit: int = 20, token: str | bool | None = None) -> list[FoundDrafter]:
    """List the drafters that the Hub has for a target: first those that load, sorted by downloads.

    Args:
        target (`str`): OWNER/NAME of the target on the Hub.
        limit (`int`, *optional*, defaults to 20): Maximum number of repositories to inspect, the most
            downloaded first.
        token (`str` or `bool`, *optional*): Token for the Hub.

    Returns:
        `list[FoundDrafter]`: The repositories, including those that do not load, with the reason.

    Raises:
        OSError: If the Hub does not know the target, or the connection fails.
    """
    api = HfApi(token=token, **CLIENT)
    made_from = f"base_model:{target}"
    own_name = target.rpartition("/")[2]
    queries: list[dict[str, Any]] = [{"filter": [made_from, tag]} for tag in TAGS]
    queries += [{"filter": made_from, "search": word} for word in WORDS]
    queries += [{"search": f"{own_name}-{word}"} for word in WORDS]
    details: Any = ["downloads", "lastModified", "sha", "siblings"]

    def ask(query: dict[str, Any]) -> list[ModelInfo]:
        return list(api.list_models(**query, sort="downloads", limit=MOST_OF_ONE_QUERY, expand=details))

    with _explained(f"finding drafters for {target}"), ThreadPoolExecutor(THREADS) as pool:
        api.model_info(target, expand=["sha"])
        by_name = {info.id: info for infos in pool.map(ask, queries) for info in infos if info.id != target}
        most_used = sorted(by_name.values(), key=lambda info: -(info.downloads or 0))[:limit]
        found = list(pool.map(lambda info: _inspect(api, info), most_used))
    return sorted(found, key=lambda drafter: drafter.format is None)  # stable, so both groups stay sorted by downloads


def _inspect(api: HfApi, info: ModelInfo) -> FoundDrafter:
    """Read a repository's configuration in the same way as when a drafter is loaded."""
    form = None
    refused = None
    files = [file.rfilename for file in info.siblings or ()]
    try:
        with tempfile.TemporaryDirectory() as cache:
            path = api.hf_hub_download(info.id, CONFIG, revision=info.sha, cache_dir=cache)
            stored = _read_config(Path(path))
        if format_of(stored) is None:
            refuse_others(stored)
            refused = "not a drafter"
        else:
            form = interpret(stored)[0].name
    except GatedRepoError:
        refused = "access is granted on request, on its page"
    except RemoteEntryNotFoundError:
        refused = f"not a drafter: there is no {CONFIG}"
        if ADAPTER_CONFIG in files:
            refused = f"an adapter, which loads if the model in its {ADAPTER_CONFIG} is a drafter"
    except (HTTPError, OSError) as error:  # deleted or disabled since it was listed, or out of reach
        refused = f"the Hub lists it, but does not serve it: {' '.join(str(error).split())}"
    except Exception as error:  # anybody's file can raise anything, and must not hide the other repositories
        refused = " ".join(str(error).split())
    if form and files and not any(name.endswith(".safetensors") for name in files):
        refused = f"a drafter without weights in safetensors ({form}): convert them"
        form = None
    day = None
    if info.last_modified:
        day = info.last_modified.strftime("%Y-%m-%d")
    return FoundDrafter(info.id, info.sha, form, refused, info.downloads or 0, day)


def _read_config(path: Path) -> dict[str, Any]:
    """Read a repository's configuration; its errors do not name the temporary folder."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {CONFIG} cannot be read: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"its {CONFIG} cannot be read: it holds no object.")
    return stored

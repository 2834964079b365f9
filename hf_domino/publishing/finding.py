"""Drafters on the Hub for a target.

The Hub knows models made from another, not that one drafts for it. So what names the target as its base model is asked
for by tags and words of drafters, as are repositories that only carry the target's name; their configurations say what
they are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, RemoteEntryNotFoundError
from huggingface_hub.hf_api import ModelInfo

from hf_domino import __version__
from hf_domino._common.refusal import refusal
from hf_domino.formats.loading import interpret
from hf_domino.formats.others import refuse_others
from hf_domino.formats.registry import format_of
from hf_domino.formats.source import CONFIG
from hf_domino.publishing.answers import check_name, explained

TAGS = ("speculative-decoding", "draft-model", "speculators", "domino", "dflash", "eagle", "eagle3")
WORDS = ("domino", "dflash", "draft", "speculator", "eagle", "mtp")  # in names
MOST_OF_ONE_KIND = 100  # repositories asked for at once, the most downloaded first
THREADS = 8


@dataclass(frozen=True)
class FoundDrafter:
    """A repository that may hold a drafter for the target.

    Args:
        name (`str`): Its name on the Hub.
        commit (`str`, *optional*): What was looked at.
        format (`str`, *optional*): Which format of drafters it has; None where it does not load.
        refused (`str`, *optional*): Why it does not load.
        downloads (`int`): Of the last 30 days.
        last_modified (`str`, *optional*): Date, as YYYY-MM-DD.
    """

    name: str
    commit: str | None
    format: str | None
    refused: str | None
    downloads: int
    last_modified: str | None

    @property
    def usage(self) -> tuple[str, ...]:
        """The lines that use it; none where it does not load."""
        if self.format is None:
            return ()
        return (
            f'drafter = DominoDraftModel.from_pretrained("{self.name}")',
            "target.generate(**inputs, assistant_model=drafter)",
        )


def find(target: str, *, limit: int = 20, token: str | bool | None = None) -> list[FoundDrafter]:
    """List drafters on the Hub for a target: those that load first, then by downloads.

    Args:
        target (`str`): OWNER/NAME of the target on the Hub.
        limit (`int`, *optional*, defaults to 20): Repositories to look into, the most downloaded ones.
        token (`str` or `bool`, *optional*): Of the Hub; defaults to HF_TOKEN or the login.

    Raises:
        ValueError: If there is no such target, or the Hub does not answer.
    """
    if Path(target).exists():
        remedy = "Name it as it is called there; a folder's own name the Hub does not know."
        raise refusal("the target", "on the Hub", target, remedy)
    check_name(target, "the target")
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}.")
    api = HfApi(token=token, library_name="hf_domino", library_version=__version__)
    with explained(target, "finding drafters for"):
        api.model_info(target, expand=["sha"])
        by_name = {info.id: info for info in _candidates(api, target) if info.id != target}
        most_used = sorted(by_name.values(), key=lambda info: -(info.downloads or 0))[:limit]
        with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(THREADS) as pool:
            configs = pool.map(lambda info: _download(api, info, cache), most_used)
            found = [_judge(info, config) for info, config in zip(most_used, configs, strict=True)]
    return sorted(found, key=lambda drafter: drafter.format is None)  # stable: by downloads among equals


def _candidates(api: HfApi, target: str) -> Iterator[ModelInfo]:
    made_from, own_name = f"base_model:{target}", target.partition("/")[2]
    queries: list[dict[str, Any]] = [{"filter": [made_from, tag]} for tag in TAGS]
    queries += [{"filter": made_from, "search": word} for word in WORDS]
    queries += [{"search": f"{own_name}-{word}"} for word in WORDS]
    with ThreadPoolExecutor(THREADS) as pool:
        for infos in pool.map(lambda query: _ask(api, query), queries):
            yield from infos


def _ask(api: HfApi, query: dict[str, Any]) -> Iterable[ModelInfo]:
    details = api.list_models(
        **query, sort="downloads", limit=MOST_OF_ONE_KIND, expand=["downloads", "lastModified", "sha", "siblings"]
    )
    return list(details)


def _download(api: HfApi, info: ModelInfo, cache: str) -> Path | str:
    """The repository's config.json, or why there is none to be had."""
    try:
        return Path(api.hf_hub_download(info.id, CONFIG, revision=info.sha, cache_dir=cache))
    except GatedRepoError:
        return "access is granted on request, on its page"
    except RemoteEntryNotFoundError:
        return f"not a drafter: there is no {CONFIG}"


def _judge(info: ModelInfo, config: Path | str) -> FoundDrafter:
    form, refused = _format_of(config) if isinstance(config, Path) else (None, config)
    files = [file.rfilename for file in info.siblings or ()]
    if form and files and not any(name.endswith(".safetensors") for name in files):
        form, refused = None, f"a drafter without weights in safetensors ({form}): convert them"
    day = info.last_modified.strftime("%Y-%m-%d") if info.last_modified else None
    return FoundDrafter(info.id, info.sha, form, refused, info.downloads or 0, day)


def _format_of(config: Path) -> tuple[str | None, str | None]:
    """What the loading of a drafter says of a configuration: its format, or why it does not load."""
    try:
        stored = json.loads(config.read_text(encoding="utf-8"))
        if format_of(stored) is None:
            refuse_others(stored)
            return None, "not a drafter"
        return interpret(stored)[0].name, None
    except (ValueError, AttributeError) as error:
        return None, " ".join(str(error).split())

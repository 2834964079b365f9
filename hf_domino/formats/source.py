"""Where a checkpoint comes from: a folder, or the Hub; told at once if it is neither."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from transformers import PreTrainedConfig

from hf_domino._common.refusal import refusal
from hf_domino.formats.registry import format_of

HUB_TIMEOUT = 5  # seconds in which it must answer whether it knows a name
CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"


def check_source(name: str | Path, field: str, **download: Any) -> None:
    """Refuse at once what is no folder and not on the Hub: Transformers would try the network again and again.

    Args:
        name (`str` or `Path`): A folder or a Hub name.
        field (`str`): What it was given as.
        download: What `from_pretrained` takes for the Hub: `cache_dir`, `revision`, `subfolder`, `token`,
            `local_files_only`.

    Raises:
        ValueError: If there is no such folder, and it is no name on the Hub or the Hub does not answer.
    """
    path = Path(name)
    reason = None if str(name) and path.is_dir() else _why_not_on_hub(str(name), download)
    if reason is not None:
        near = difflib.get_close_matches(path.name, _folders(path.parent), n=1)
        hint = f" Did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise ValueError(
            f"{field} must be a folder or a Hub name, got {str(name)!r}: there is no such folder{reason}.{hint}"
        )


def check_is_target(name: str | Path, field: str, **download: Any) -> None:
    """Refuse a drafter in the place of a target, whose tokenizer would be missed first.

    Args:
        name (`str` or `Path`): A folder or a Hub name.
        field (`str`): What it was given as.
        download: As in [`check_source`].

    Raises:
        ValueError: If it holds a drafter.
    """
    try:
        stored = PreTrainedConfig.get_config_dict(str(name), **download)[0]
    except OSError:  # an adapter's folder, or whatever Transformers will say of it
        return
    if format_of(stored) is not None:
        raise refusal(field, "a target", f"a drafter ({name})", "Were target and drafter swapped?")


def _why_not_on_hub(name: str, download: dict[str, Any]) -> str | None:
    """Why nothing can be loaded from the Hub by this name; None if it may be worth trying."""
    places = {key: download[key] for key in ("cache_dir", "revision") if download.get(key) is not None}
    files = ["/".join(filter(None, (download.get("subfolder"), file))) for file in (CONFIG, ADAPTER_CONFIG)]
    try:
        if any(isinstance(try_to_load_from_cache(name, file, **places), str) for file in files):
            return None
        if download.get("local_files_only"):
            return ", it was not downloaded before, and local_files_only=True"
        url = hf_hub_url(name, files[0], revision=places.get("revision"))
        get_hf_file_metadata(url, token=download.get("token"), timeout=HUB_TIMEOUT)
    except HFValidationError:
        return ""
    except GatedRepoError:
        return None  # loading it says what to do
    except RepositoryNotFoundError:
        return ", and the Hub does not know it, or not for you (`hf auth login`)"
    except (EntryNotFoundError, HfHubHTTPError):
        return None
    except Exception as error:  # of the connection, and of whichever library makes it
        is_slow = "Timeout" in type(error).__name__  # it may have it yet
        return None if is_slow else f", it was not downloaded before, and the Hub does not answer ({error})"
    return None


def _folders(parent: Path) -> list[str]:
    return [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []

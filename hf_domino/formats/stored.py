"""What a checkpoint has stored, looked at before a model is built: one error that names the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from transformers.utils import is_peft_available
from transformers.utils.hub import cached_file

from hf_domino._common.refusal import refusal
from hf_domino.formats.format import TARGET_TENSORS, Format, StoredConfig
from hf_domino.formats.source import ADAPTER_CONFIG, CONFIG

FLOATS = {"F64", "F32", "F16", "BF16"}  # what safetensors calls them
CUT_SHORT = "Consistency check failed"  # huggingface_hub's words for a download of another size than was told
AGAIN = "Download the checkpoint again, or save the drafter again."


def read_config(name: str | os.PathLike, download: dict[str, Any]) -> StoredConfig | None:
    """Read the configuration of a checkpoint.

    Args:
        name (`str` or `Path`): A folder, a Hub name, or the file itself.
        download (`dict`): What `from_pretrained` takes for the Hub.

    Returns:
        `Mapping`: config.json; None where there is an adapter, whose base has one.

    Raises:
        ValueError: If there is none, or it is no object.
    """
    if os.path.isfile(name):
        return read_object(Path(name))
    path = _find(name, CONFIG, download)
    if path is not None:
        return read_object(path)
    if _find(name, ADAPTER_CONFIG, download) is not None:
        if not is_peft_available():
            raise refusal(ADAPTER_CONFIG, "absent without peft", "an adapter", "pip install peft")
        return None
    place = "/".join(filter(None, (str(name), download.get("subfolder"))))
    raise refusal(CONFIG, f"in {place}", None, AGAIN)


def check_weights(name: str | os.PathLike, found: Format, download: dict[str, Any], variant: str | None) -> None:
    """Refuse weights that are missing, pickled, broken off, no numbers, or stored twice.

    Args:
        name (`str` or `Path`): A folder or a Hub name.
        found ([`Format`]): The checkpoint's format.
        download (`dict`): What `from_pretrained` takes for the Hub.
        variant (`str`, *optional*): Part of the files' names, as `from_pretrained` takes it.

    Raises:
        ValueError: For the first that is; it names the file or the tensors.
    """
    stored: dict[str, str] = {}  # our names of tensors -> theirs
    for path in _weight_files(name, f".{variant}" if variant else "", download):
        for theirs in _tensors(path):
            ours = theirs
            for pattern, replacement in found.renames.items():
                ours = re.sub(pattern, replacement, ours)
            if ours in stored:
                raise refusal("the checkpoint's tensors", "there once each", f"{stored[ours]} and {theirs}", AGAIN)
            stored[ours] = theirs


def _weight_files(name: str | os.PathLike, variant: str, download: dict[str, Any]) -> Iterator[Path]:
    single = f"model{variant}.safetensors"
    # In the order in which Transformers looks for them.
    if (path := _find(name, single, download)) is not None:
        yield path
        return
    path = _find(name, f"model.safetensors.index{variant}.json", download)
    if path is None:
        remedy = "Pickled weights (pytorch_model.bin) are not loaded, as a pickle can hold anything: convert them."
        raise refusal(single, f"among the weights of {name}, or an index of its shards", None, remedy)
    for shard in _shards(path, read_object(path).get("weight_map")):
        file = _find(name, shard, download)
        if file is None:
            raise refusal(f"{shard} of {path.name}", f"in {name}", None, AGAIN)
        yield file


def _shards(index: Path, places: Any) -> Iterable[str]:
    """The files that an index names, none of them outside of its folder."""
    files = list(places.values()) if isinstance(places, dict) else []
    wrong = [file for file in files if not isinstance(file, str) or Path(file).name != file]
    if wrong or not files:
        value = wrong[0] if wrong else places
        raise refusal(f"weight_map of {index.name}", "an object that names a file for each tensor", value, AGAIN)
    return sorted(set(files))


def _tensors(path: Path) -> list[str]:
    """Names of what a file holds, without parts of the target."""
    try:
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if not any(re.search(part, name) for part in TARGET_TENSORS)]  # noqa: SIM118
            dtypes = {name: file.get_slice(name).get_dtype() for name in names}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise refusal(f"{path.name} of the checkpoint", "a whole safetensors file", reason, AGAIN) from error
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            remedy = "The weights are quantised; an engine such as vLLM or SGLang may run them."
            raise refusal(f"the dtype of the checkpoint's {name}", f"one of {', '.join(sorted(FLOATS))}", dtype, remedy)
    return names


def _find(name: str | os.PathLike, file: str, download: dict[str, Any]) -> Path | None:
    """Where a file of the checkpoint is, downloaded first where it must be; None if it has none."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    try:
        found = cached_file(name, file, **download, **quiet)
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and CUT_SHORT not in str(error):
            raise  # Transformers' own words are good
        reason = " ".join(str(error).split())
        raise refusal(f"{file} of {name}", "downloaded whole", reason, "Load it again when the Hub answers.") from error
    return None if found is None else Path(found)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path (`Path`): The file.

    Raises:
        ValueError: If it does not; naming it.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON, or of text
        raise refusal(f"{path}", "a JSON file", f"{error}", AGAIN) from error
    if not isinstance(stored, dict):
        raise refusal(f"{path}", "a JSON object", stored, AGAIN)
    return stored

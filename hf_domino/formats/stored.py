"""What a checkpoint has stored, looked at before a model is built: one error that names the file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from transformers.utils import is_peft_available
from transformers.utils.hub import cached_file

from hf_domino._common.refusal import refusal
from hf_domino.formats.format import Format, StoredConfig, is_of_target
from hf_domino.formats.source import ADAPTER_CONFIG, CONFIG

FLOATS = {"F64", "F32", "F16", "BF16"}  # what safetensors calls them
CUT_SHORT = "Consistency check failed"  # huggingface_hub's words for a download of another size than was told
AGAIN = "Download the checkpoint again, or save the drafter again."


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint as the header of its file describes it.

    Args:
        path (`Path`): The file.
        name (`str`): What the file calls it.
        shape (`tuple[int, ...]`): Its sizes.
    """

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Its values, on the CPU."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.name)


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


def stored_tensors(
    name: str | os.PathLike, found: Format, download: dict[str, Any], variant: str | None
) -> dict[str, StoredTensor]:
    """What a checkpoint's files hold, by our names; refuse them if missing, pickled, broken off, or stored twice.

    Args:
        name (`str` or `Path`): A folder or a Hub name.
        found ([`Format`]): The checkpoint's format.
        download (`dict`): What `from_pretrained` takes for the Hub.
        variant (`str`, *optional*): Part of the files' names, as `from_pretrained` takes it.

    Raises:
        ValueError: For the first that is; it names the file or the tensors.
    """
    stored: dict[str, StoredTensor] = {}
    for path in _weight_files(name, f".{variant}" if variant else "", download):
        for tensor in _tensors(path):
            ours = tensor.name
            for pattern, replacement in found.renames.items():
                ours = re.sub(pattern, replacement, ours)
            ours = ours.removeprefix("model.")  # as Transformers does
            if ours in stored and not is_of_target(tensor.name):
                value = f"{stored[ours].name} and {tensor.name}"
                raise refusal("the checkpoint's tensors", "there once each", value, AGAIN)
            stored[ours] = tensor
    return stored


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


def _tensors(path: Path) -> list[StoredTensor]:
    """What a file holds."""
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = [StoredTensor(path, name, tuple(part.get_shape())) for name, part in slices.items()]
            dtypes = {name: part.get_dtype() for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise refusal(f"{path.name} of the checkpoint", "a whole safetensors file", reason, AGAIN) from error
    for name, dtype in dtypes.items():
        if dtype not in FLOATS and not is_of_target(name):
            remedy = "The weights are quantised; an engine such as vLLM or SGLang may run them."
            raise refusal(f"the dtype of the checkpoint's {name}", f"one of {', '.join(sorted(FLOATS))}", dtype, remedy)
    return found


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

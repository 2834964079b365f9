"""Find a checkpoint in a folder or on the Hub, and inspect what it stores before a model is built.

Each error names the file, or says at once that there is neither such a folder nor such a Hub name.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig
from transformers.utils import is_peft_available
from transformers.utils.hub import cached_file

from hf_domino._common.errors import invalid_argument
from hf_domino.formats.fields import Format, StoredConfig, is_of_target
from hf_domino.formats.registry import format_of

FolderOrName = str | os.PathLike  # a folder or a Hub name
Download = Mapping[str, Any]  # arguments of `from_pretrained` for the Hub
RECYCLING = "recycling"  # in place of a drafter's name: the one that needs no training
CHECKOUT = Path(__file__).parents[2]  # of the repository; another folder where pip installed the package
CARDS = "model_cards"  # folder in a checkout of the repository
IN_A_CLONE = f"{CARDS}/ is a folder of the repository, which pip does not install: run this in a clone."
HUB_TIMEOUT = 5  # seconds in which the Hub must answer whether it has a name
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
FLOATS = {"F64", "F32", "F16", "BF16"}  # safetensors' names for them
CUT_SHORT = "Consistency check failed"  # huggingface_hub's message if a download does not have the announced size
INSTALL_PEFT = "Run `pip install peft`."
AGAIN = "Download the checkpoint again, or save the drafter again."


def check_source(name: str | Path, field: str, words: Sequence[str] = (), **download: Any) -> None:
    """Raise an error at once if a name is neither a folder nor on the Hub; Transformers would retry the network.

    `words` are those that the field accepts in place of a name, which the error may suggest.
    """
    path = Path(name)
    if str(name) and path.is_dir():
        return
    reason = _why_not_on_hub(str(name), download)
    if reason is None:
        return
    raise ValueError(
        f"{field} must be a folder or a Hub name, got {str(name)!r}: there is no such folder{reason}."
        f"{_hint(path, words)}"
    )


def _hint(path: Path, words: Sequence[str]) -> str:
    """Return a sentence that says which folder or word may be meant by a path at which there is no folder."""
    folders = [path.parent]
    if path.parent == Path(CARDS):
        folders.append(CHECKOUT / CARDS)
    for folder in folders:
        names = [other.name for other in folder.glob("*/")]
        if folder == Path():
            names += words
        near = difflib.get_close_matches(path.name, names, n=1)
        if near:
            return f" Did you mean {str(folder / near[0])!r}?"
    if path.parent == Path(CARDS) and not any(folder.is_dir() for folder in card_folders()):
        return f" {IN_A_CLONE}"
    return ""


def is_in_checkout(name: str) -> bool:
    """Return whether a model's name is that of a folder in a checkout of the repository."""
    return name.startswith(f"{CARDS}/")


def path_in_checkout(name: str) -> str:
    """Return a path that holds in the working directory for a model in the checkout; other names stay as they are."""
    there = CHECKOUT / name
    if is_in_checkout(name) and there.is_dir() and not Path(name).is_dir():
        return str(there)
    return name


def card_folders() -> list[Path]:
    """Return the folders to search for published models: the checkout's, then the working directory's."""
    return [root / CARDS for root in dict.fromkeys((CHECKOUT, Path.cwd()))]


def check_is_target(name: str | Path, field: str, **download: Any) -> None:
    """Raise an error if a target's name is that of a drafter, before a missing tokenizer causes a less helpful one."""
    try:
        stored = PreTrainedConfig.get_config_dict(str(name), **download)[0]
    except OSError:  # an adapter's folder, or a problem that Transformers will report
        return
    if format_of(stored) is not None:
        raise invalid_argument(field, "a target", f"a drafter ({name})", "Were target and drafter swapped?")


def has_model(folder: Path) -> bool:
    """Return whether a folder contains a model or an adapter, of any kind."""
    return any((folder / file).is_file() for file in (CONFIG, ADAPTER_CONFIG))


def _why_not_on_hub(name: str, download: Download) -> str | None:
    """Return why nothing can be loaded from the Hub by this name; None if it is worth trying."""
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
    except (GatedRepoError, EntryNotFoundError):  # the error when loading it says what to do
        return None
    except RepositoryNotFoundError:
        return ", and the Hub does not have it, or does not show it to you (`hf auth login`)"
    except HfHubHTTPError:
        return None
    except Exception as error:  # connection errors, of whichever library makes the connection
        if "Timeout" in type(error).__name__:  # the Hub may have it nevertheless
            return None
        return f", it was not downloaded before, and the Hub does not answer ({error})"
    return None


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint, as the header of its file describes it."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Load the values of the tensor on the CPU."""
        with safe_open(self.path, "pt") as file:
            return file.get_tensor(self.name)


def read_config(name: FolderOrName, download: Download) -> StoredConfig | None:
    """Read the config.json of a folder or a Hub name, or the file itself; None for an adapter, which has none."""
    if os.path.isfile(name):
        return read_object(Path(name))
    path = find_file(name, CONFIG, download)
    if path is not None:
        return read_object(path)
    if find_file(name, ADAPTER_CONFIG, download) is not None:
        if not is_peft_available():
            raise invalid_argument(ADAPTER_CONFIG, "absent without the package peft", "an adapter", INSTALL_PEFT)
        return None
    place = "/".join(filter(None, (str(name), download.get("subfolder"))))
    if checkpoints := list(filter(has_model, Path(place).glob("checkpoint-*"))):
        newest = max(checkpoints, key=lambda folder: folder.stat().st_mtime)
        remedy = f"Run the command that began it again, or name {newest}."
        raise invalid_argument(f"the training in {place}", "finished", "one that was interrupted", remedy)
    raise invalid_argument(CONFIG, f"in {place}", None, AGAIN)


def stored_tensors(
    name: FolderOrName, found: Format, download: Download, variant: str | None
) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors by our names; missing, pickled or truncated files and duplicates are errors."""
    stored: dict[str, StoredTensor] = {}
    for path in _weight_files(name, f".{variant}" if variant else "", download):
        for tensor in _tensors(path):
            ours = found.rename(tensor.name).removeprefix("model.")  # as Transformers does
            if ours in stored and not is_of_target(tensor.name):
                value = f"{stored[ours].name} and {tensor.name}"
                raise invalid_argument("the checkpoint's tensors", "there once each", value, AGAIN)
            stored[ours] = tensor
    return stored


def _weight_files(name: FolderOrName, variant: str, download: Download) -> Iterator[Path]:
    single = f"model{variant}.safetensors"
    # In the order in which Transformers looks for them.
    if (path := find_file(name, single, download)) is not None:
        yield path
        return
    path = find_file(name, f"model.safetensors.index{variant}.json", download)
    if path is None:
        remedy = "Pickled weights (pytorch_model.bin) are not loaded, as a pickle can hold anything: convert them."
        raise invalid_argument(single, f"among the weights of {name}, or an index of its shards", None, remedy)
    places = read_object(path).get("weight_map")
    files = []
    if isinstance(places, dict):
        files = list(places.values())
    wrong = [file for file in files if not isinstance(file, str) or Path(file).name != file]  # all must be here
    if wrong or not files:
        value = wrong[0] if wrong else places
        raise invalid_argument(
            f"weight_map of {path.name}", "an object that names a file for each tensor", value, AGAIN
        )
    for shard in sorted(set(files)):
        file = find_file(name, shard, download)
        if file is None:
            raise invalid_argument(f"{shard} of {path.name}", f"in {name}", None, AGAIN)
        yield file


def _tensors(path: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a file."""
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_slice(name)
                if (dtype := tensor.get_dtype()) not in FLOATS and not is_of_target(name):
                    remedy = "The weights are quantised; an engine such as vLLM or SGLang may run them."
                    expected = f"one of {', '.join(sorted(FLOATS))}"
                    raise invalid_argument(f"the dtype of the checkpoint's {name}", expected, dtype, remedy)
                yield StoredTensor(path, name, tuple(tensor.get_shape()))
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise invalid_argument(f"{path.name} of the checkpoint", "a whole safetensors file", reason, AGAIN) from error


def find_file(name: FolderOrName, file: str, download: Download) -> Path | None:
    """Return the path of a file of the checkpoint, and download it if needed; None if there is no such file."""
    quiet = {"_raise_exceptions_for_missing_entries": False}
    try:
        found = cached_file(name, file, **download, **quiet)
    except (HTTPError, OSError) as error:
        if isinstance(error, OSError) and CUT_SHORT not in str(error):
            raise  # Transformers' own message is good
        reason = " ".join(str(error).split())
        raise invalid_argument(
            f"{file} of {name}", "downloaded completely", reason, "Load it again when the Hub answers."
        ) from error
    return None if found is None else Path(found)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # invalid JSON, or invalid text
        raise invalid_argument(f"{path}", "a JSON file", f"{error}", AGAIN) from error
    if not isinstance(stored, dict):
        raise invalid_argument(f"{path}", "a JSON object", stored, AGAIN)
    return stored

"""Find, load and merge PEFT adapters of drafters, as `PeftModel.save_pretrained` writes them.

An adapter's folder has no config.json. Its adapter_config.json names the drafter that it belongs to. If this package
trained the adapter, `target.json` beside it names the target that it was trained for.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.fields import StoredConfig
from hf_domino.formats.loading import DOWNLOAD_ARGUMENTS, check_loaded, interpret, shown
from hf_domino.formats.registry import format_of
from hf_domino.formats.source import (
    ADAPTER_CONFIG,
    AGAIN,
    CONFIG,
    Download,
    FolderOrName,
    check_source,
    find_file,
    read_config,
    read_object,
)
from hf_domino.targets.identity import TargetIdentity

PREFIX = "base_model.model."  # of tensor names in an adapter's file
TARGET_FILE = "target.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", TARGET_FILE)
WHOLE_FILES = (CONFIG, "model*.safetensors", "model.safetensors.index.json")
BASE = "base_model_name_or_path"
# Values of `init_lora_weights` with which PEFT subtracts the adapter's start from the drafter's weights: those that it
# computes from these weights alone, and the beginnings of those that depend on random numbers or on other data.
SUBTRACTED = ("pissa", "olora")
NOT_REPEATED = ("pissa_niter", "corda", "loftq", "lora_ga")
CONVERT = (
    "With other values, PEFT cannot find the changed weights again: let it convert the adapter "
    "(`path_initial_model_for_weight_conversion` of its `save_pretrained`)."
)
# Arguments for the adapter's download that apply to its drafter's download, too.
_OF_BOTH = ("cache_dir", "force_download", "proxies", "token")


def base_of(name: FolderOrName, download: Download) -> tuple[str, Download]:
    """Find the drafter that an adapter belongs to.

    Args:
        name (`str` or `PathLike`): The adapter's folder or Hub name.
        download (`Mapping[str, Any]`): Arguments of `from_pretrained` for the adapter's download.

    Returns:
        `tuple[str, dict]`: The drafter's folder or Hub name, and the arguments for its download.

    Raises:
        ValueError: If the adapter names no other drafter, or one that does not exist.
    """
    path = find_file(name, ADAPTER_CONFIG, download)
    assert path is not None  # callers have found that there is no config.json
    base = read_object(path).get(BASE)
    field = f"{BASE} in {ADAPTER_CONFIG} of {os.fspath(name)}"
    is_itself = isinstance(base, str) and Path(base).is_dir() and Path(base).samefile(path.parent)
    if not isinstance(base, str) or not base or is_itself:
        remedy = f"Load the drafter, and then drafter.load_adapter({os.fspath(name)!r})."
        raise invalid_argument(field, "the drafter's folder or Hub name", base, remedy)
    of_base = {key: download[key] for key in _OF_BOTH if key in download}
    if not os.path.isdir(name) and "local_files_only" in download:
        of_base["local_files_only"] = download["local_files_only"]
    check_source(base, field, **of_base)
    return base, of_base


def stored_config(name: FolderOrName, download: Download) -> StoredConfig:
    """Read the config.json of a model; for an adapter, that of the drafter that it belongs to."""
    stored = read_config(name, download)
    if stored is None:
        return stored_config(*base_of(name, download))
    return stored


def unread_fields(name: FolderOrName) -> list[str]:
    """List the fields of a loaded drafter's config.json that are not read although they may change drafts."""
    stored = stored_config(name, {"local_files_only": True})
    found = format_of(stored)
    if found is None:
        return []
    return found.unread(stored)


def drafter_config(name: FolderOrName) -> DominoConfig:
    """Read the configuration of a drafter or an adapter from a folder or Hub name, without its weights."""
    config = interpret(stored_config(name, {}))[1]
    if read_config(name, {}) is None:
        _record_target(config, name, {})
    return config


def load_adapted(load: Callable[..., Any], name: FolderOrName, *args: Any, **arguments: Any) -> tuple[Any, Any]:
    """Load an adapter's drafter and merge the adapter into its weights.

    Args:
        load (`Callable`): `DominoDraftModel.from_pretrained`, which also loads a drafter that is an adapter itself.
        name (`str` or `PathLike`): The adapter's folder or Hub name.
        args, arguments: Arguments of `from_pretrained`.

    Returns:
        `tuple`: The drafter, and Transformers' loading info.
    """
    download = {key: arguments.pop(key) for key in DOWNLOAD_ARGUMENTS if key in arguments}
    base, of_base = base_of(name, download)
    arguments.pop("use_safetensors", None)
    drafter, info = load(base, *args, **arguments, **of_base, output_loading_info=True)
    drafter = _merge(drafter, os.fspath(name), download)
    _record_target(drafter.config, name, download)
    drafter.name_or_path = drafter.config.name_or_path = os.fspath(name)
    return drafter, info


def check_start(config: Any, field: str) -> None:
    """Raise a `ValueError` if an adapter's `init_lora_weights` changed the drafter in a way that loading cannot repeat.

    Args:
        config (`PeftConfig`): The adapter's configuration.
        field (`str`): What the adapter is, for the error.
    """
    start = getattr(config, "init_lora_weights", True)
    if isinstance(start, str) and start.startswith(NOT_REPEATED):
        expected = f"a value that leaves the drafter's weights as they are, or {' or '.join(map(repr, SUBTRACTED))}"
        raise invalid_argument(f"init_lora_weights of {field}", expected, start, CONVERT)


def _merge(drafter: Any, name: str, download: Download) -> Any:
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict, load_peft_weights

    field = f"the adapter {name}"
    try:
        tensors = load_peft_weights(name, device="cpu", **download)
        config = PeftConfig.from_pretrained(name, **download)
    except Exception as error:
        raise _cannot_merge(field, error) from error
    check_start(config, field)
    try:
        is_subtracted = getattr(config, "init_lora_weights", True) in SUBTRACTED
        if is_subtracted:
            config.init_lora_weights = True
        # The adapter is created on the meta device, so that sizes that only its configuration states take no memory.
        adapted = PeftModel.from_pretrained(drafter, name, config=config, low_cpu_mem_usage=True, **download)
        # For embeddings, PEFT would read the configuration in the drafter's folder, which may be in another format.
        described = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        merged = None
        if described == set(tensors):
            if is_subtracted:  # its sizes are right, and PEFT subtracts its start from the drafter's weights
                base = adapted.unload()
                base.__dict__.pop("peft_config", None)
                adapted = PeftModel.from_pretrained(base, name, **download)
            merged = adapted.merge_and_unload()
    except Exception as error:
        raise _cannot_merge(field, error) from error
    if merged is None:
        lost = described - set(tensors)
        word = "without"
        if not lost:
            lost = set(tensors) - described
            word = "with"
        value = f"a file {word} {shown(sorted(one.removeprefix(PREFIX) for one in lost))}"
        raise invalid_argument(field, "of the tensors that its configuration describes", value, AGAIN)
    check_loaded(tensors, missing=())
    merged.__dict__.pop("peft_config", None)
    return merged.requires_grad_(True)


def _cannot_merge(field: str, error: Exception) -> ValueError:
    """Create the error about an error of PEFT, which can be of any class and names neither the file nor the field."""
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return invalid_argument(field, "one that PEFT can merge into its drafter", reason, AGAIN)


def trace_of_files(folder: Path) -> tuple:
    """Return a value that changes when a file of a drafter or adapter in a folder is replaced; empty without files.

    For an adapter, it also covers the drafter that the adapter belongs to, if that is in a folder.
    """
    paths = sorted({path for pattern in (*WHOLE_FILES, *ADAPTER_FILES) for path in folder.glob(pattern)})
    states = [(path, path.stat()) for path in paths]
    trace = tuple((path, state.st_mtime_ns, state.st_size, state.st_ino) for path, state in states)
    if folder / ADAPTER_CONFIG in paths and folder / CONFIG not in paths:
        base = read_object(folder / ADAPTER_CONFIG).get(BASE)
        if isinstance(base, str) and base and Path(base).is_dir() and not Path(base).samefile(folder):
            trace += trace_of_files(Path(base).absolute())
    return trace


def save_adapter(adapted: Any, folder: str | os.PathLike) -> None:
    """Save the adapter of a drafter, without PEFT's own card, which would not describe a drafter.

    Args:
        adapted (`PeftModel`): The drafter in PEFT's wrapper.
        folder (`str` or `PathLike`): The folder, which must exist.
    """
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        # To find out whether embeddings belong to the adapter, PEFT would ask the Hub for the drafter's vocabulary.
        adapted.save_pretrained(aside, save_embedding_layers=False)
        for path in Path(aside).iterdir():
            place = Path(folder, path.name)
            if place.is_dir():  # an adapter with a name of its own
                shutil.rmtree(place)
            if path.name != "README.md":
                path.replace(place)


def finish_saving(folder: str | os.PathLike, config: DominoConfig, is_adapter: bool) -> None:
    """Write an adapter's target beside it, and delete files that an earlier training in the other form left behind.

    Args:
        folder (`str` or `PathLike`): The folder in which a drafter or an adapter was saved.
        config (`DominoConfig`): The drafter's configuration, which records the target.
        is_adapter (`bool`): Whether an adapter was saved instead of a whole drafter.
    """
    for pattern in WHOLE_FILES if is_adapter else ADAPTER_FILES:
        for path in Path(folder).glob(pattern):
            path.unlink()
    if is_adapter and (target := TargetIdentity.recorded_in(config)):
        Path(folder, TARGET_FILE).write_text(json.dumps(target.to_dict(), indent=2) + "\n", encoding="utf-8")


def _record_target(config: DominoConfig, name: FolderOrName, download: Download) -> None:
    """Record the target of an adapter in a configuration, if the adapter's folder names one."""
    path = find_file(name, TARGET_FILE, download)
    if path is not None and (target := TargetIdentity.from_dict(read_object(path))):
        target.record_in(config)

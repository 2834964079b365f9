"""A checkpoint of another format, told to Transformers' `from_pretrained` in its own words.

These are a configuration and new names for tensors. Everything else is left to it: shards, dtypes, devices, revisions,
downloads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from hf_domino.compatibility import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.formats.fields import CORRECT_IT
from hf_domino.formats.format import Format, StoredConfig
from hf_domino.formats.others import refuse_others
from hf_domino.formats.registry import format_of
from hf_domino.formats.source import check_source

DOWNLOAD_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
NAME = "pretrained_model_name_or_path"


def translate(name: Any, arguments: dict[str, Any]) -> Format | None:
    """Read which format a checkpoint is of, and add what loads it to the arguments of `from_pretrained`.

    Args:
        name (`str` or `Path`): A folder or a Hub name.
        arguments (`dict`): Of `from_pretrained`. Ours and what is no checkpoint of a drafter leave them as they are;
            for others `config`, `key_mapping` and `use_safetensors` are set, and fields of [`DominoConfig`] taken out.

    Returns:
        [`Format`]: The format; None for our own.

    Raises:
        ValueError: If there is no such folder or Hub name, or it holds a drafter that cannot be loaded.
    """
    if not isinstance(name, (str, os.PathLike)) or isinstance(arguments.get("config"), PreTrainedConfig):
        return None
    download = {key: arguments[key] for key in DOWNLOAD_ARGUMENTS if key in arguments}
    if not os.path.exists(name):
        check_source(os.fspath(name), NAME, **download)
    stored = _read(arguments.get("config") or name, download)
    if stored.get("model_type") != DominoConfig.model_type:
        refuse_others(stored)
    found = format_of(stored)
    if found is not None:
        overrides = {key: arguments.pop(key) for key in list(arguments) if key in DominoConfig.__annotations__}
        arguments["config"] = _config(found, stored, overrides)
        arguments["key_mapping"] = dict(found.renames)
        arguments["use_safetensors"] = True  # a pickle can hold anything
    return found


def _read(name: Any, download: dict[str, Any]) -> StoredConfig:
    try:
        return PreTrainedConfig.get_config_dict(name, **download)[0]
    except OSError:  # an adapter's folder, or one without config.json: Transformers' own words are good
        return {}


def _config(found: Format, stored: StoredConfig, overrides: dict[str, Any]) -> DominoConfig:
    try:
        fields = found.fields(stored) | overrides
        _check_types(fields)
        return DominoConfig(**fields)
    except (StrictDataclassError, TypeError, KeyError) as error:  # of Transformers' configurations
        reason = " ".join(str(error).split())
        raise ValueError(f"config.json ({found.name}) cannot be read: {reason}. {CORRECT_IT}") from error


def _check_types(fields: Mapping[str, Any]) -> None:
    """Ranges are compared before types are, by which a text in place of a number gives an error without a name."""
    for name, annotation in DominoConfig.__annotations__.items():  # texts, such as "list[int] | None"
        kinds = {kind.partition("[")[0] for kind in annotation.split(" | ")}
        kind = "None" if fields.get(name) is None else type(fields[name]).__name__
        if name in fields and kind not in kinds and not (kind == "int" and "float" in kinds):
            expected = " or ".join(sorted(kinds))
            raise refusal(f"{name} in the checkpoint's config.json", expected, fields[name], CORRECT_IT)


def check_no_extras(found: Format, unexpected: Iterable[str]) -> None:
    """Refuse tensors of a checkpoint that a drafter does not have: it would draft otherwise than it was trained to.

    Args:
        found ([`Format`]): The checkpoint's format.
        unexpected (`Iterable[str]`): Names of tensors that were not loaded, without the target's.

    Raises:
        ValueError: If there are any.
    """
    if extra := sorted(unexpected):
        expected = f"those of a drafter ({found.name})"
        remedy = "hf_domino knows no such part of a drafter; load a checkpoint without it."
        raise refusal("the checkpoint's tensors", expected, f"also {', '.join(extra)}", remedy)


def explain(found: Format, error: Exception) -> ValueError:
    """Say what is wrong with weights that Transformers could not read.

    Args:
        found ([`Format`]): The checkpoint's format.
        error (`Exception`): What it raised.
    """
    expected = "whole safetensors files (pickled weights are not loaded)"
    reason = " ".join(str(error).split())
    remedy = "Download the checkpoint again, or convert its weights."
    return refusal(f"the weights of this {found.name} checkpoint", expected, reason, remedy)

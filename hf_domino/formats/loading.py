"""A checkpoint of another format, told to Transformers' `from_pretrained` in its own words.

These are a configuration and new names for tensors. Everything else is left to it: shards, dtypes, devices, revisions,
downloads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils.hub import resolve_revision

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.formats.draft_vocabulary import untold
from hf_domino.formats.fields import CORRECT_IT, DTYPE_FIELDS, required
from hf_domino.formats.format import Format, StoredConfig
from hf_domino.formats.others import refuse_others
from hf_domino.formats.registry import format_of
from hf_domino.formats.source import check_source
from hf_domino.formats.stored import read_config, stored_tensors

DOWNLOAD_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
PINNED_BY = ("cache_dir", "local_files_only", "token")
NAME = "pretrained_model_name_or_path"
OURS = Format(DominoConfig.model_type, lambda stored: stored.get("model_type") == DominoConfig.model_type, dict)


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint is of, beside its configuration.

    Args:
        format ([`Format`]): Its format, [`OURS`] for our own.
        token_ids (`torch.Tensor`, *optional*): The ids `[D]` of a draft vocabulary that is to be cut out of it.
    """

    format: Format
    token_ids: torch.Tensor | None


def translate(name: Any, arguments: dict[str, Any]) -> Checkpoint | None:
    """Read which format a checkpoint is of, and add what loads it to the arguments of `from_pretrained`.

    Args:
        name (`str` or `Path`): A folder or a Hub name.
        arguments (`dict`): Of `from_pretrained`. `config`, `key_mapping`, `use_safetensors` and, for the Hub, the
            `revision` are set, and fields of [`DominoConfig`] taken out. An adapter's stay as they are.

    Returns:
        [`Checkpoint`]: What it is of; None for adapters.

    Raises:
        ValueError: If there is no such folder or Hub name, or it holds a drafter that cannot be loaded.
    """
    arguments["use_safetensors"] = True  # a pickle can hold anything
    if not isinstance(name, (str, os.PathLike)):
        return None
    _pin(name, arguments)
    download = {key: arguments[key] for key in DOWNLOAD_ARGUMENTS if key in arguments}
    found = OURS
    # None of it asks for all tokens, whatever is stored
    is_told = "draft_vocab_size" in arguments or isinstance(arguments.get("config"), PreTrainedConfig)
    if not isinstance(arguments.get("config"), PreTrainedConfig):
        stored = read_config(arguments.get("config") or name, download)
        if stored is None:
            return None
        overrides = {key: arguments.pop(key) for key in list(arguments) if key in DominoConfig.__annotations__}
        found, arguments["config"] = interpret(stored, overrides)
        arguments["key_mapping"] = dict(found.renames)
    tensors = stored_tensors(name, found, download, arguments.get("variant"))
    arguments["force_download"] = False  # all of it is here now
    return Checkpoint(found, None if is_told else untold(tensors, arguments["config"]))


def _pin(name: str | os.PathLike, arguments: dict[str, Any]) -> None:
    """Read everything from one commit, whatever is pushed meanwhile."""
    if os.path.isdir(name):
        return
    download = {key: arguments[key] for key in DOWNLOAD_ARGUMENTS if key in arguments}
    check_source(os.fspath(name), NAME, **download)
    asked = {key: arguments[key] for key in PINNED_BY if key in arguments}
    revision = resolve_revision(name, arguments.get("revision"), **asked)
    if revision is not None:
        arguments["revision"] = revision


def interpret(stored: StoredConfig, overrides: Mapping[str, Any] | None = None) -> tuple[Format, DominoConfig]:
    """Say which format a configuration is of, [`OURS`] among them, and tell it as ours.

    Args:
        stored (`Mapping`): A checkpoint's config.json.
        overrides (`Mapping`, *optional*): Fields of [`DominoConfig`] to set in place of its own.

    Raises:
        ValueError: If it is that of no drafter, of one of another kind, or cannot be read.
    """
    found = _format_of(stored)
    return found, _config(found, stored, dict(overrides or {}))


def _format_of(stored: StoredConfig) -> Format:
    if OURS.matches(stored):
        return OURS
    refuse_others(stored)
    found = format_of(stored)
    if found is None:
        required(stored, "model_type")
        DominoConfig.from_dict(dict(stored))  # says what it is not
    return found or OURS


def _config(found: Format, stored: StoredConfig, overrides: dict[str, Any]) -> DominoConfig:
    try:
        fields = found.fields(stored) | overrides
        _check_types(fields)
        return DominoConfig.from_dict(fields)
    except (
        StrictDataclassError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:  # of Transformers' configurations
        reason = " ".join(str(error).split())
        raise ValueError(f"config.json ({found.name}) cannot be read: {reason}. {CORRECT_IT}") from error


def _check_types(fields: Mapping[str, Any]) -> None:
    """Ranges are compared before types are, by which a text in place of a number gives an error without a name."""
    for name, annotation in DominoConfig.__annotations__.items():  # texts, such as "list[int] | None"
        if name in fields and not any(_is_a(kind, fields[name]) for kind in annotation.split(" | ")):
            expected = annotation.replace(" | ", " or ")
            raise refusal(f"{name} in the checkpoint's config.json", expected, fields[name], CORRECT_IT)
    dtype = next((fields[name] for name in DTYPE_FIELDS if fields.get(name) is not None), "float32")
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise refusal("dtype in the checkpoint's config.json", "a float type of torch's", dtype, CORRECT_IT)
    if fields.get("hidden_act", "silu") not in ACT2FN:
        expected = "one that transformers knows"
        raise refusal("hidden_act in the checkpoint's config.json", expected, fields["hidden_act"], CORRECT_IT)


def _is_a(kind: str, value: Any) -> bool:
    """Whether a value is of a type, given as the text of its annotation."""
    kind, _, inner = kind.removesuffix("]").partition("[")
    found = "None" if value is None else type(value).__name__
    return (found == kind or (found, kind) == ("int", "float")) and (
        not inner or all(_is_a(inner, element) for element in value)
    )


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

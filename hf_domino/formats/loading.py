"""A checkpoint of another format, told to Transformers' `from_pretrained` in its own words.

These are a configuration and new names for tensors. Everything else is left to it: shards, dtypes, devices, revisions,
downloads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils.hub import resolve_revision

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.formats.draft_vocabulary import untold
from hf_domino.formats.eagle3 import EAGLE3
from hf_domino.formats.fields import CANNOT_RUN, CORRECT_IT, DTYPE_FIELDS, LABELS, required
from hf_domino.formats.format import Format, StoredConfig
from hf_domino.formats.others import refuse_others
from hf_domino.formats.registry import OURS, format_of
from hf_domino.formats.sizes import check_tensors
from hf_domino.formats.source import check_source
from hf_domino.formats.stored import read_config, stored_tensors
from hf_domino.kinds import KINDS

DOWNLOAD_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
PINNED_BY = ("cache_dir", "local_files_only", "token")
DTYPES = ("bfloat16", "float16", "float32", "float64")  # torch multiplies matrices of no other
OWN = ("embed_tokens.weight", "lm_head.weight")  # of the target, unless a checkpoint of EAGLE-3 holds them
NAME = "pretrained_model_name_or_path"
WHICH_LAYERS = (
    "The layers it was trained on stand in its training's configuration: give them as from_pretrained(..., "
    "target_layer_ids=[...]), counted from 0."
)


def translate(name: Any, arguments: dict[str, Any]) -> torch.Tensor | None:
    """Read which format a checkpoint is of, and add what loads it to the arguments of `from_pretrained`.

    Args:
        name (`str` or `Path`): A folder or a Hub name.
        arguments (`dict`): Of `from_pretrained`. `config`, `key_mapping`, `use_safetensors` and, for the Hub, the
            `revision` are set, and fields of [`DominoConfig`] taken out. An adapter's stay as they are.

    Returns:
        `torch.Tensor`: The ids `[D]` of a draft vocabulary that is to be cut out of what is loaded; None for most.

    Raises:
        ValueError: If there is no such folder or Hub name, or it holds a drafter that cannot be loaded.
    """
    arguments["use_safetensors"] = True  # a pickle can hold anything
    if not isinstance(name, (str, os.PathLike)):
        if arguments.get("config") is not None and arguments.get("state_dict") is not None:
            check_tensors(arguments["config"], OURS, arguments["state_dict"])
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
    if found is EAGLE3:
        arguments["config"].own_embeddings, arguments["config"].own_lm_head = (each in tensors for each in OWN)
    token_ids = None if is_told else untold(tensors, arguments["config"])
    check_tensors(arguments["config"], found, tensors)
    arguments["force_download"] = False  # all of it is here now
    return token_ids


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
    found = format_of(stored)
    for part in (stored, *stored.values()):
        if isinstance(part, Mapping) and (quantised := part.get("quantization_config")) is not None:
            raise refusal("quantization_config", "absent", quantised, f"The weights are quantised. {CANNOT_RUN}")
    if found is not OURS:
        refuse_others(stored)
    if found is None:
        required(stored, "model_type")
        DominoConfig.from_dict(dict(stored))  # says what it is not
    assert found is not None
    return found, _config(found, stored, dict(overrides or {}))


def _config(found: Format, stored: StoredConfig, overrides: dict[str, Any]) -> DominoConfig:
    try:
        fields = found.fields(stored) | overrides
        kind = KINDS.get(fields.get("projector_type", "domino"))
        if fields.get("target_layer_ids") is None and kind is not None and not kind.may_ask_target:
            raise refusal("target_layer_ids in the checkpoint's config.json", "given", None, WHICH_LAYERS)
        fields.pop(LABELS, None)
        _check_types(fields, overrides)
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


def _check_types(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Ranges are compared before types are, by which a text in place of a number gives an error without a name."""
    for name, annotation in DominoConfig.__annotations__.items():  # texts, such as "list[int] | None"
        if name in fields and not any(_is_a(kind, fields[name]) for kind in annotation.split(" | ")):
            expected = annotation.replace(" | ", " or ")
            if name in overrides:
                raise refusal(name, expected, fields[name], "Give another, or leave it out.")
            raise refusal(f"{name} in the checkpoint's config.json", expected, fields[name], CORRECT_IT)
    dtype = next((fields[name] for name in DTYPE_FIELDS if fields.get(name) is not None), "float32")
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise refusal("dtype in the checkpoint's config.json", f"one of {', '.join(DTYPES)}", dtype, CORRECT_IT)
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

"""Load checkpoints of any format with Transformers' own `from_pretrained`.

A checkpoint is translated into a configuration and new names for its tensors. Everything else is left to Transformers:
shards, dtypes, devices, revisions, downloads. Before anything is built, the tensors that a configuration describes are
compared with those in the headers of its files, because a size that is only in config.json could ask for any amount of
memory.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging
from transformers.utils.hub import resolve_revision

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import WIDTH
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.configuration.registry import METHODS, all_fields, config_classes
from hf_domino.formats.dflash_config import INTERLEAVED_CLASS
from hf_domino.formats.draft_vocabulary import read_draft_vocabulary
from hf_domino.formats.fields import (
    CANNOT_RUN,
    CORRECT_IT,
    DTYPE_FIELDS,
    LABELS,
    Fields,
    Format,
    StoredConfig,
    classes_of,
    is_of_target,
    misfit,
    places_of,
    refuse_others_than,
    required,
    rope_interleaved,
)
from hf_domino.formats.ours import OURS
from hf_domino.formats.registry import LOADED, format_of, refuse_others
from hf_domino.formats.source import AGAIN, FolderOrName, StoredTensor, check_source, read_config, stored_tensors

logger = logging.get_logger(__name__)

DOWNLOAD_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
PINNED_BY = ("cache_dir", "local_files_only", "token")
DTYPES = ("bfloat16", "float16", "float32", "float64")  # torch multiplies matrices of no other dtype
NAME = "pretrained_model_name_or_path"
MOST_SHOWN = 4  # names of tensors in an error
# Parts of tensor names that only occur in other methods or in quantised files.
METHOD_OF_TENSORS = {
    "k_proj_target": "DFlare",
    "lilicorr": "LiLiCorr",
    ".qweight": "quantised weights",
}
NOT_READ = (
    "config.json ({}), not read: {}. If hardly any draft is accepted, this may be why; `hf-domino check` measures it."
)
WHICH_LAYERS = (
    "Look up the layers in the configuration of its training, and pass them, counted from 0: from_pretrained(..., "
    "target_layer_ids=[...])."
)


def translate(name: Any, arguments: dict[str, Any]) -> torch.Tensor | None:
    """Set the arguments of `from_pretrained` so that they load a checkpoint.

    Args:
        name (`str` or `PathLike`, *optional*): The checkpoint's folder or Hub name.
        arguments (`dict`): Arguments of `from_pretrained`. This function sets `config`, `key_mapping`,
            `use_safetensors`, `force_download` and, for the Hub, `revision`, and removes fields of [`DominoConfig`]. If
            the checkpoint is an adapter, the fields stay.

    Returns:
        `torch.Tensor`: The ids `[D]` of a draft vocabulary to restrict the drafter to, or None for most checkpoints.
    """
    arguments["use_safetensors"] = True  # a pickle can hold anything
    if not isinstance(name, (str, os.PathLike)):
        if arguments.get("config") is not None and arguments.get("state_dict") is not None:
            check_tensors(arguments["config"], OURS, arguments["state_dict"])
        return None
    download = _pinned(name, arguments)
    found = OURS
    has_config = isinstance(arguments.get("config"), PreTrainedConfig)
    # draft_vocab_size=None asks for all tokens, whatever is stored.
    has_explicit_vocabulary = has_config or "draft_vocab_size" in arguments
    if not has_config:
        stored = read_config(arguments.get("config") or name, download)
        if stored is None:
            return None
        overrides = {key: arguments.pop(key) for key in list(arguments) if key in all_fields()}
        found, arguments["config"] = interpret(stored, overrides)
        arguments["key_mapping"] = dict(found.renames)
        if unread := found.unread(stored):
            logger.warning(NOT_READ.format(found.name, ", ".join(unread)))
    tensors = stored_tensors(name, found, download, arguments.get("variant"))
    if found is not OURS and stored is not None:
        found.check_tensors(stored, tensors)
        arguments["config"].follow_tensors({name: tensor.shape for name, tensor in tensors.items()})
    token_ids = None
    if not has_explicit_vocabulary:
        token_ids = read_draft_vocabulary(tensors, arguments["config"])
    check_tensors(arguments["config"], found, tensors)
    arguments["force_download"] = False  # everything has been downloaded by now
    return token_ids


def _pinned(name: FolderOrName, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a download, and set `revision` so that all files come from one commit."""
    download = {key: arguments[key] for key in DOWNLOAD_ARGUMENTS if key in arguments}
    if not os.path.isdir(name):
        check_source(os.fspath(name), NAME, **download)
        asked = {key: download[key] for key in PINNED_BY if key in download}
        if (revision := resolve_revision(name, download.get("revision"), **asked)) is not None:
            arguments["revision"] = download["revision"] = revision
    return download


def interpret(stored: StoredConfig, overrides: Mapping[str, Any] | None = None) -> tuple[Format, DominoConfig]:
    """Return the format of a configuration, and read it as a [`DominoConfig`], in which `overrides` replace fields."""
    found = format_of(stored)
    for part in (stored, *stored.values()):
        if isinstance(part, Mapping) and (quantised := part.get("quantization_config")) is not None:
            raise invalid_argument(
                "quantization_config", "absent", quantised, f"The weights are quantised. {CANNOT_RUN}"
            )
    if found is not OURS:
        refuse_others(stored)
    if found is None:
        required(stored, "model_type")
        DominoConfig.from_dict(dict(stored))  # raises an error that it is not a drafter
    assert found is not None
    overrides = dict(overrides or {})
    try:
        for _, place in places_of(stored):
            refuse_others_than(found.only, place)
        fields = found.read(stored)
        fields["rope_interleaved"] = rope_interleaved(stored, INTERLEAVED_CLASS in classes_of(stored))
        fields.pop(LABELS, None)
        asked = fields | overrides
        method = METHODS.get(asked.get("projector_type", DominoConfig.projector_type))
        if asked.get("target_layer_ids") is None and method is not None and method.config_class.needs_layer_ids:
            raise misfit("target_layer_ids", "given", None, WHICH_LAYERS)
        _check_types(asked, overrides)
        return found, DominoConfig.from_dict(fields, **overrides)
    except (
        StrictDataclassError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
    ) as error:  # raised by Transformers' configurations
        reason = " ".join(str(error).split())
        raise ValueError(f"config.json ({found.name}) cannot be read: {reason}. {CORRECT_IT}") from error


def _check_types(fields: Fields, overrides: Mapping[str, Any]) -> None:
    """Check types before ranges, because comparing a text with a range raises an error that does not name the field."""
    for name, annotation in all_fields().items():  # annotations are texts, such as "list[int] | None"
        if name in fields and not any(_is_a(kind, fields[name]) for kind in annotation.split(" | ")):
            expected = annotation.replace(" | ", " or ")
            if name in overrides:
                raise invalid_argument(name, expected, fields[name], "Give another, or leave it out.")
            raise misfit(name, expected, fields[name])
    dtype = next((fields[name] for name in DTYPE_FIELDS if fields.get(name) is not None), "float32")
    if str(dtype).removeprefix("torch.") not in DTYPES:
        raise misfit("dtype", f"one of {', '.join(DTYPES)}", dtype)
    if fields.get("hidden_act", "silu") not in ACT2FN:
        raise misfit("hidden_act", "one that transformers knows", fields["hidden_act"])


def _is_a(kind: str, value: Any) -> bool:
    """Return whether a value has a type, which is given as the text of an annotation."""
    kind, _, inner = kind.removesuffix("]").partition("[")
    found = "None" if value is None else type(value).__name__
    return (found == kind or (found, kind) == ("int", "float")) and (
        not inner or all(_is_a(inner, element) for element in value)
    )


def check_tensors(config: DominoConfig, found: Format, stored: Mapping[str, StoredTensor | torch.Tensor]) -> None:
    """Raise an error if tensors are missing, unknown, of another shape, or of a head that the configuration lacks."""
    for name in stored:
        for part, kind in METHOD_OF_TENSORS.items():
            if part in name:
                raise invalid_argument("the drafter's method", LOADED, f"{kind} ({name})", CANNOT_RUN)
    _check_projector_type(config, stored)
    described = config.shapes()
    parts = _told(config, "projector_type", "num_hidden_layers", "block_size")
    if missing := sorted(described.keys() - stored.keys()):
        remedy = "Save the drafter again with save_pretrained, or download the checkpoint again."
        raise invalid_argument(
            "the checkpoint's tensors", f"complete ({parts})", f"a file without {shown(missing)}", remedy
        )
    for name in sorted(described):
        if (shape := stored[name].shape) != described[name]:
            widths = [field for field, allowed in config.ranges.items() if allowed == WIDTH]
            sizes = _told(config, *widths, "vocab_size", "draft_vocab_size")
            remedy = "Load it with the configuration it was saved with."
            raise invalid_argument(f"the checkpoint's {name}", f"of shape {described[name]} ({sizes})", shape, remedy)
    if extra := sorted(name for name in stored.keys() - described.keys() if not is_of_target(name)):
        remedy = "hf_domino knows no such part of a drafter; load a checkpoint without it."
        expected = f"those of a drafter ({found.name}; {parts})"
        raise invalid_argument("the checkpoint's tensors", expected, f"also {shown(extra)}", remedy)


def _told(config: DominoConfig, *fields: str) -> str:
    return ", ".join(f"{field}={getattr(config, field)!r}" for field in fields)


def check_loaded(tensors: Mapping[str, torch.Tensor], missing: Collection[str]) -> None:
    """Raise an error if tensors are missing (hence random), NaN or infinite: hardly any draft would be accepted."""
    if missing:  # they were there when the headers were read
        remedy = "The checkpoint was changed while it was read. Load it again."
        raise invalid_argument(
            "the checkpoint's tensors", "complete", f"a file without {shown(sorted(missing))}", remedy
        )
    for name, tensor in tensors.items():
        is_read = type(tensor) is torch.Tensor and not tensor.is_meta
        if is_read and not torch.stack(tensor.aminmax()).isfinite().all():
            raise invalid_argument(f"the checkpoint's {name}", "finite", "NaN or infinity", AGAIN)


def _check_projector_type(config: DominoConfig, stored: Collection[str]) -> None:
    parts = {name.split(".")[0] for name in stored}
    own = config.head_modules()
    fitting = config.projector_type
    why = ""
    headless = config.headless()
    if own and headless is not None and "layers" in parts and parts.isdisjoint(own):
        fitting = headless.projector_type
        why = f"it has no {' and '.join(own)}: plain {headless.title}"
    for method in config_classes():
        heads = set(method.head_modules()).difference(own)
        if surplus := sorted(tensor for tensor in stored if tensor.split(".")[0] in heads):
            fitting = method.projector_type
            why = f"it has a correction head: {', '.join(surplus)}"
    if why:
        remedy = f"Set projector_type={fitting!r} in its configuration, or load a {config.title} checkpoint."
        raise invalid_argument(
            "projector_type", f"{fitting!r} for this checkpoint ({why})", config.projector_type, remedy
        )


def shown(names: list[str]) -> str:
    """Join names of tensors for an error message: the first few, and how many there are."""
    first = ", ".join(names[:MOST_SHOWN])
    if len(names) <= MOST_SHOWN:
        return first
    return f"{first} ... ({len(names)} tensors)"

"""Identify the target that a drafter, a text or a checkpoint belongs to, and compare it with another model.

The same target may be stored in another dtype, quantised, adapted or elsewhere. Weights are therefore identified by
their signs, which no rounding to another dtype changes, while fine-tuning changes some of them. Paths, dtypes and
versions are not part of a digest.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
import weakref
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig, PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino._common.forks import Lock

if TYPE_CHECKING:
    from hf_domino.configuration.domino_config import DominoConfig

# The fields that define the shape of a decoder, under the names that all model families share.
CONFIG_FIELDS = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "kv_lora_rank", "q_lora_rank", "moe_intermediate_size"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"),
)
# Values that replace the digest of weights and say why there is none.
ADAPTED, QUANTISED, OFFLOADED, SHARDED = UNREADABLE = ("adapted", "quantised", "offloaded", "sharded")
# A digest covers up to 256 pieces of 1024 signs. Fine-tuning that moves weights by 1e-4 of their standard deviation
# flips about eight of these signs.
MAX_PIECES = 256
PIECE_LENGTH = 1024
_HUB_SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]+)")


@dataclass(frozen=True)
class TargetIdentity:
    """The name, revision, digests and dtype that identify a target; unknown ones are None."""

    name: str | None = None  # on the Hub, or of its folder
    revision: str | None = None  # commit on the Hub
    config_digest: str | None = None  # of the sizes in its configuration
    weights_digest: str | None = None  # of a few of its weights, or one of `UNREADABLE`
    dtype: str | None = None  # in which it ran; a difference is reported, but is never an error

    @classmethod
    def recorded_in(cls, config: DominoConfig) -> TargetIdentity | None:
        """Return the target that a drafter's configuration records, or None if it records none."""
        return cls.from_dict({name: getattr(config, f"target_{name}", None) for name in _FIELDS})

    @classmethod
    def from_dict(cls, values: dict[str, Any] | None) -> TargetIdentity | None:
        """Return the identity that [`to_dict`] wrote; None if it is empty."""
        known = {name: value for name, value in (values or {}).items() if name in _FIELDS and value is not None}
        return cls(**known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)

    def record_in(self, config: DominoConfig) -> None:
        """Write this target into the configuration of a drafter."""
        for name, value in asdict(self).items():
            setattr(config, f"target_{name}", value)

    def has_weights_of(self, other: TargetIdentity) -> bool | None:
        """Return whether both have the same weights; None if the weights of one of them cannot be read."""
        digests = (self.weights_digest, other.weights_digest)
        if set(digests) & {None, *UNREADABLE}:
            return None
        return digests[0] == digests[1]


_FIELDS = tuple(part.name for part in fields(TargetIdentity))


# --- identify -----------------------------------------------------------------------------------------------------


def identify(target: PreTrainedModel) -> TargetIdentity:
    """Identify a target by its configuration and a few of its weights."""
    name, revision = _name_of(target)
    return TargetIdentity(
        name=name,
        revision=revision,
        config_digest=config_digest(target.config),
        weights_digest=weights_digest(target),
        dtype=str(target.dtype).removeprefix("torch."),
    )


def _name_of(target: PreTrainedModel) -> tuple[str | None, str | None]:
    """Return the Hub name and commit, as far as they are known; for a folder, the name is the folder's."""
    given = str(target.name_or_path or "")
    if snapshot := _HUB_SNAPSHOT.search(given):
        return snapshot[1].replace("--", "/"), snapshot[2]
    is_folder = Path(given).is_absolute() or Path(given).is_dir() or given.count("/") != 1
    return (Path(given).absolute().name if given and is_folder else given) or None, commit_of(target)


def commit_of(model: PreTrainedModel) -> str | None:
    """Return the commit on the Hub that a model was loaded from; None if it came from a folder."""
    name = str(model.name_or_path or "")
    known = getattr(model.config, "_commit_hash", None)
    if known is not None or not name or Path(name).exists():
        return known
    try:
        config = try_to_load_from_cache(name, "config.json")  # transformers 5.23 does not keep the commit
    except HFValidationError:  # the name is that of a deleted folder
        return None
    if isinstance(config, str):
        return Path(config).parent.name
    return None


def config_digest(config: PreTrainedConfig) -> str:
    """Return a digest of the sizes in a target's configuration, which is the same for targets of equal shape."""
    text = config.get_text_config(decoder=True)
    values = text.to_dict()
    names = getattr(text, "attribute_map", None) or {}
    known = {field: value for field in CONFIG_FIELDS if (value := values.get(names.get(field, field))) is not None}
    return _digest(json.dumps(known, sort_keys=True, default=str).encode())


@torch.no_grad()
def weights_digest(target: PreTrainedModel) -> str:
    """Return a digest of the signs of some values of some matrices, or one of `UNREADABLE`."""
    is_text = target.config.get_text_config(decoder=True) is target.config  # else other towers are left out
    parts = torch.nn.ModuleList([target] if is_text else [target.get_decoder(), target.get_output_embeddings()])
    matrices = [weight.data for weight in parts.parameters() if weight.dim() > 1 or not weight.numel()]
    narrow = any(not matrix.is_floating_point() or matrix.element_size() < 2 for matrix in matrices)
    if is_adapted(target):
        return ADAPTED
    if narrow or getattr(target.config, "quantization_config", None) is not None:
        return QUANTISED
    if any(matrix.is_meta for matrix in matrices):
        return OFFLOADED
    if any(not matrix.numel() or hasattr(matrix, "device_mesh") for matrix in matrices):
        return SHARDED
    if any(type(matrix) is not torch.Tensor for matrix in matrices):
        return QUANTISED
    step = -(-len(matrices) // MAX_PIECES)
    signs = [torch.signbit(_piece(matrix)).flatten().cpu() for matrix in matrices[:: max(1, step)]]
    return _digest(torch.cat(signs).numpy().tobytes() if signs else b"")


def is_adapted(target: PreTrainedModel) -> bool:
    """Return whether the model contains a PEFT adapter."""
    return bool(getattr(target, "peft_config", None))


def _piece(matrix: torch.Tensor) -> torch.Tensor:
    """Return a view of some rows from the middle of a matrix, or of a stack of matrices."""
    rows = matrix.flatten(end_dim=-2)
    count = -(-PIECE_LENGTH // rows.shape[1])
    start = max(0, (len(rows) - count) // 2)
    return rows[start : start + count, :PIECE_LENGTH]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


# --- compare ------------------------------------------------------------------------------------------------------


# The fields to compare, in the order in which differences are reported.
_COMPARED = ("dtype", "config_digest", "weights_digest", "name", "revision")


def differences(recorded: TargetIdentity, found: TargetIdentity) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two targets differ, each with both values."""
    # Unknown values, the commits of equal weights and the publishers in front of names are not compared.
    pairs = {field: (getattr(recorded, field), getattr(found, field)) for field in _COMPARED}
    if recorded.has_weights_of(found):
        del pairs["revision"]
    if len({str(name).rpartition("/")[2].casefold() for name in pairs["name"]}) == 1:
        del pairs["name"]
    return {field: (old, new) for field, (old, new) in pairs.items() if None not in (old, new) and old != new}


def check_same(recorded: TargetIdentity | None, found: TargetIdentity, what: str, remedy: str) -> None:
    """Raise an error if data of two targets would be mixed.

    The weights decide whether it is the same target; if they cannot be read, name and revision do.
    """
    if recorded is None:
        return
    if recorded.has_weights_of(found) is None:
        ignored = {"dtype"}
    else:
        ignored = {"dtype", "name", "revision"}
    if {recorded.weights_digest, found.weights_digest} & {OFFLOADED, SHARDED}:  # these only say where weights are
        ignored.add("weights_digest")
    for field, (expected, value) in differences(recorded, found).items():
        if field not in ignored:
            of_name = f"{expected!r} (that of {recorded.name or 'the target'}, with which {what} was made)"
            raise invalid_argument(f"the target's {field}", of_name, value, remedy)


def check_recorded(config: DominoConfig, target: PreTrainedModel) -> None:
    """Raise an error for a target that cannot be a copy of the one that a drafter's configuration records."""
    recorded = TargetIdentity.recorded_in(config)
    found = identity_of(target)
    if recorded is not None and _decisive_differences(recorded, found):
        expected = f"{recorded.name or 'another'}, for which the drafter was made"
        remedy = "To draft for it anyway, call hf_domino.attach(target, drafter)."
        raise invalid_argument("the target", expected, found.name, remedy)


def _decisive_differences(recorded: TargetIdentity, found: TargetIdentity) -> set[str]:
    """Return the differing fields that show that a target is not a copy of the recorded one."""
    fields = {"config_digest"}
    is_copy = recorded.has_weights_of(found)
    if is_copy is None:  # two names on the Hub are two models, unless one was made from the other
        is_of_folder = any("/" not in str(identity.name) for identity in (recorded, found))
        is_copy = is_of_folder or bool({recorded.weights_digest, found.weights_digest} & {ADAPTED, QUANTISED})
    if not is_copy:
        fields.add("name")
    return fields & differences(recorded, found).keys()


# --- at a call ----------------------------------------------------------------------------------------------------


_identities: weakref.WeakKeyDictionary[PreTrainedModel, tuple[tuple[torch.dtype, bool], TargetIdentity]]
_identities = weakref.WeakKeyDictionary()  # identities, with the dtype and the presence of adapters when they were read
_warned: weakref.WeakKeyDictionary[PreTrainedModel, set[tuple[TargetIdentity, str]]] = weakref.WeakKeyDictionary()
_lock = Lock()


def identity_of(target: PreTrainedModel) -> TargetIdentity:
    """Return the identity of a target, which is computed once, and again only if its dtype or adapters change."""
    state = (target.dtype, is_adapted(target))
    with _lock:
        if target not in _identities or _identities[target][0] != state:
            _identities[target] = state, identify(target)
        return _identities[target][1]


def recognise(config: DominoConfig, target: PreTrainedModel) -> str | None:
    """Describe how a target differs from the one that a drafter was trained for, and warn once if it is another one."""
    recorded = TargetIdentity.recorded_in(config)
    if recorded is None:
        return None
    found = identity_of(target)
    words = {
        field: now if now in UNREADABLE else f"{field.replace('_', ' ')} {now} (recorded: {before})"
        for field, (before, now) in differences(recorded, found).items()
    }
    telling = _decisive_differences(recorded, found)
    with _lock:
        warned = _warned.setdefault(target, set())
        new = [words[field] for field in words if field in telling and (recorded, words[field]) not in warned]
        warned.update((recorded, one) for one in new)
    if new:
        warnings.warn(
            f"This drafter was trained for {recorded.name or 'another target'}, but this target has {', '.join(new)}. "
            "The output is still the target's own, but fewer drafts may be accepted: "
            "hf_domino.check_fit(drafter, target, tokenizer) measures how many.",
            stacklevel=2,
        )
    return ", ".join(words.values()) or None

"""Identify the models that a text, a checkpoint, a drafter or a measurement belongs to, and compare them with others.

The same model may be stored in another dtype, quantised, adapted or elsewhere. Weights are therefore identified by
their signs, which no rounding to another dtype changes, while fine-tuning changes some of them, and by their sizes,
which are compared with a tolerance. Paths, dtypes and versions are not part of a digest.

A digest has two parts, joined by `-`: `SIZES-VALUES` of a configuration, `SIGNS-SIZES` of weights. Digests that were
recorded before the second parts existed are compared by their first part alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
import weakref
from collections.abc import Mapping, Sequence
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
# The signs are those of up to 256 pieces of 1024 values. Fine-tuning that moves weights by 1e-4 of their standard
# deviation flips about eight of them.
MAX_PIECES = 256
PIECE_LENGTH = 1024
# The sizes are those of all weights, in 16 sums of logarithms, which are counted in sixteenths of a doubling.
NUM_SIZES = 16
STEPS_OF_A_DOUBLING = 16
SIZE_TOLERANCE = 1  # rounding to another dtype moves a sum by less than one step; scaling a weight by 1.1 by two
SMALLEST = 2.0**-14  # added to a size, because float16 rounds smaller values coarsely
# Fields of a configuration that no hidden state depends on, in whole or in part.
_NAMED_WITHOUT_EFFECT = ("max_position_embeddings", "tie_word_embeddings", "use_cache", "auto_map", "pretraining_tp")
_WITHOUT_EFFECT = ("token_id", "dropout", "init", "dtype", "loss", "output_", "quantization")
_HUB_SNAPSHOT = re.compile(r"models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]+)")


@dataclass(frozen=True)
class TargetIdentity:
    """The name, revision, digests and dtype that identify a target; unknown ones are None."""

    name: str | None = None  # on the Hub, or of its folder
    revision: str | None = None  # commit on the Hub
    config_digest: str | None = None  # of its configuration
    weights_digest: str | None = None  # of its weights, or one of `UNREADABLE`
    dtype: str | None = None  # in which it ran; a difference is reported, but is never an error

    @classmethod
    def recorded_in(cls, config: DominoConfig) -> TargetIdentity | None:
        """Return the target that a drafter's configuration records, or None if it records none."""
        return cls.from_dict({name: getattr(config, f"target_{name}", None) for name in _FIELDS})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> TargetIdentity | None:
        """Return the identity that [`to_dict`] wrote; None if it is empty."""
        known = {name: value for name, value in (values or {}).items() if name in _FIELDS and value is not None}
        return cls(**known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)

    @property
    def known(self) -> dict[str, Any]:
        """The fields that are known, for lines of results, of which there are many."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def record_in(self, config: DominoConfig) -> None:
        """Write this target into the configuration of a drafter."""
        for name, value in asdict(self).items():
            setattr(config, f"target_{name}", value)

    def has_weights_of(self, other: TargetIdentity) -> bool | None:
        """Return whether both have the same weights; None if the weights of one of them cannot be read."""
        digests = (self.weights_digest, other.weights_digest)
        if set(digests) & {None, *UNREADABLE}:
            return None
        return difference("weights_digest", str(digests[0]), str(digests[1])) is None


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
    if not isinstance(config, str):
        return None
    found = list(Path(config).parents[1].glob("*/config.json"))
    if len(found) > 1:  # one of them is that of the branch `main`, but the model may come from another
        return None
    return found[0].parent.name


def config_digest(config: PreTrainedConfig) -> str:
    """Return a digest of the sizes in a model's configuration, and one of all values that change what it computes."""
    text = config.get_text_config(decoder=True)
    values = text.to_dict()
    names = getattr(text, "attribute_map", None) or {}
    known = {field: value for field in CONFIG_FIELDS if (value := values.get(names.get(field, field))) is not None}
    return "-".join(_digest(json.dumps(part, sort_keys=True, default=str).encode()) for part in (known, _chosen(text)))


def _chosen(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields that change what a decoder computes, if they differ from their defaults.

    Defaults are left out, because a newer version of transformers adds fields that an older one does not have.
    Configurations of other towers are left out, too.
    """
    try:
        usual = type(config)().to_dict()
    except Exception:  # classes in a model's own code need not have defaults
        usual = {}
    ignored = {*PreTrainedConfig().to_dict(), *_NAMED_WITHOUT_EFFECT, *(f"target_{name}" for name in _FIELDS)}
    return {
        name: value
        for name, value in config.to_dict().items()
        if value != usual.get(name)
        and name not in ignored
        and not name.startswith("_")
        and not any(part in name for part in _WITHOUT_EFFECT)
        and not (isinstance(value, dict) and "model_type" in value)
    }


@torch.no_grad()
def weights_digest(target: PreTrainedModel) -> str:
    """Return a digest of the signs of some weights and the sizes of all, or one of `UNREADABLE`."""
    is_text = target.config.get_text_config(decoder=True) is target.config  # else other towers are left out
    parts = torch.nn.ModuleList([target] if is_text else [target.get_decoder(), target.get_output_embeddings()])
    weights = [weight.data for weight in parts.parameters()]
    matrices = [weight for weight in weights if weight.dim() > 1 or not weight.numel()]
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
    pieces = [_piece(weight).float().cpu() for weight in weights]
    step = max(1, -(-len(matrices) // MAX_PIECES))
    of_matrices = [piece for piece, weight in zip(pieces, weights, strict=True) if weight.dim() > 1]
    signs = [torch.signbit(piece).flatten() for piece in of_matrices[::step]]
    return f"{_digest(torch.cat(signs).numpy().tobytes() if signs else b'')}-{_sizes_of(pieces)}"


def _sizes_of(pieces: Sequence[torch.Tensor]) -> str:
    """Return the sizes of weights as 16 bytes in hexadecimal, which any structured change of one weight changes."""
    sums = [0.0] * NUM_SIZES
    for place, piece in enumerate(pieces):
        sums[place % NUM_SIZES] += math.log2(float(piece.abs().mean()) + SMALLEST)
    return bytes(round(STEPS_OF_A_DOUBLING * total) % 256 for total in sums).hex()


def is_adapted(target: PreTrainedModel) -> bool:
    """Return whether the model contains a PEFT adapter."""
    return bool(getattr(target, "peft_config", None))


def _piece(matrix: torch.Tensor) -> torch.Tensor:
    """Return a view of some values of a vector, or of some rows from the middle of a matrix or a stack of matrices."""
    rows = torch.atleast_2d(matrix).flatten(end_dim=-2)
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
    known = {field: pair for field, pair in pairs.items() if None not in pair}
    return {field: parts for field, pair in known.items() if (parts := difference(field, *pair)) is not None}


def difference(field: str, old: str, new: str) -> tuple[str, str] | None:
    """Return two different values of a field, of digests only the parts that differ; None if they are the same."""
    if not field.endswith("_digest") or {old, new} & set(UNREADABLE):
        return None if old == new else (old, new)
    (first, old_rest), (second, new_rest) = (digest.partition("-")[::2] for digest in (old, new))
    if first != second:
        return first, second
    if not (old_rest and new_rest):  # an older version recorded only the first part
        return None
    if field == "weights_digest":
        is_same = _are_near(bytes.fromhex(old_rest), bytes.fromhex(new_rest))
    else:
        is_same = old_rest == new_rest
    return None if is_same else (old_rest, new_rest)


def _are_near(sizes: bytes, others: bytes) -> bool:
    """Return whether the sizes of weights are the same within the rounding of dtypes."""
    steps = [one - other for one, other in zip(sizes, others, strict=True)]
    return all(min(step % 256, -step % 256) <= SIZE_TOLERANCE for step in steps)


def has_sizes_of(config_digest: str, other: str) -> bool:
    """Return whether two configurations have the same sizes, whatever their other values are."""
    return config_digest.partition("-")[0] == other.partition("-")[0]


def check_same(
    recorded: TargetIdentity | None, found: TargetIdentity, what: str, remedy: str, model: str = "the target"
) -> None:
    """Raise an error if data of two targets, or of two others with the same role (`model`), would be mixed.

    The weights decide whether it is the same model; if they cannot be read, name and revision do.
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
            of_name = f"{expected!r} (that of {recorded.name or model}, with which {what} was made)"
            raise invalid_argument(f"{model}'s {field}", of_name, value, remedy)


def check_same_models(
    recorded: Mapping[str, Mapping[str, Any]] | None, found: Mapping[str, Mapping[str, Any]], what: str, remedy: str
) -> None:
    """Raise an error if results of different models would be mixed.

    Args:
        recorded (`Mapping`, *optional*): The field `models` of a result: a name, such as `"target"`, to the known
            fields of an identity. None if the result was made before it had this field.
        found (`Mapping`): The same of the models at hand.
        what (`str`): The file of the results.
        remedy (`str`): What to do about a difference.
    """
    if recorded is None or recorded.keys() != found.keys():
        expected = f"those with which {what} was made, {[*recorded] if recorded else 'which it does not record'}"
        raise invalid_argument("models", expected, [*found], remedy)
    for name in found:
        ours = TargetIdentity.from_dict(found[name]) or TargetIdentity()
        check_same(TargetIdentity.from_dict(recorded[name]), ours, what, remedy, f"the {name}")


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
    fields = set()
    if not has_sizes_of(recorded.config_digest or "", found.config_digest or ""):
        fields.add("config_digest")  # other values, such as those for longer texts, make no other target
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

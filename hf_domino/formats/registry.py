"""The formats that can be loaded, in the order in which they are tried, and methods that are rejected by name."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import OF_TRANSFORMERS, DominoConfig
from hf_domino.configuration.registry import all_fields
from hf_domino.formats.dflash_config import DFLASH_CONFIG, MUSE_GLIMMER, SECTION
from hf_domino.formats.eagle3 import EAGLE3
from hf_domino.formats.fields import CANNOT_RUN, ROTARY, Fields, Format, StoredConfig
from hf_domino.formats.speculators import SPECULATORS

ALWAYS_OURS = "draft_pool_size"  # in every file that we wrote, and in no other project's
NAMING_FIELDS = ("architectures", "model_type", "speculators_model_type", "projector_type")
LOADED = "Domino, DFlash, DFlash 2, DSpark, DFly, XPress or EAGLE-3"
OTHER_DSPARK, OTHER_EAGLE3, OTHER_DFLASH, OTHER_DFLY, OTHER_XPRESS = (
    f"{name} in another layout" for name in ("DSpark", "EAGLE-3", "DFlash", "DFly", "XPress")
)
# Methods and layouts that we cannot load, each with a pattern in the names of its classes and types; below, fields that
# only they set.
OTHER_KINDS = {
    "P-EAGLE": "peagle",
    "EAGLE, not EAGLE-3": r"eagle(?!3)",
    "Medusa": "medusa",
    "DFlash or DSpark on Gemma": "gemma4dspark",
    "DSpark with gated attention": "qwen35dspark",
    OTHER_DFLY: "dfly",
    "DFlare": "dflare",
    OTHER_XPRESS: "xpress",
    OTHER_DSPARK: "dspark",
    "LiLiCorr": "lilicorr",
    "JetSpec in another layout": "jetspec",
    "MTP": "mtp",
    # These are recognised by name before any field is read, because fields have other meanings there.
    OTHER_EAGLE3: "eagle3",
    OTHER_DFLASH: "dflash",
}
OTHER_FIELDS = {
    "P-EAGLE": ("parallel_drafting",),
    "Medusa": ("medusa_num_heads", "medusa_num_layers"),
    OTHER_DSPARK: ("markov_rank", "markov_head_type", "enable_confidence_head"),
    "LiLiCorr": ("lilicorr_enabled",),
}


def _is_ours(stored: StoredConfig) -> bool:
    """Return whether a file is ours: another project's Domino has the same `model_type`, but other or fewer fields."""
    names = {name for name, value in stored.items() if value not in (None, False)}
    has_ours_alone = names <= all_fields().keys() | DominoConfig.__dataclass_fields__.keys() | OF_TRANSFORMERS
    return stored.get("model_type") == DominoConfig.model_type and (
        ALWAYS_OURS in stored or (has_ours_alone and "head_dim" in names)
    )


class _OurFields:
    """The fields of all methods, including methods that are registered later."""

    def __iter__(self) -> Iterator[str]:
        return iter((*DominoConfig.__dataclass_fields__, *all_fields(), *OF_TRANSFORMERS, *ROTARY))


def _own_fields(stored: StoredConfig) -> Fields:
    """Return all fields of a file except those of [`ROTARY`], which are read from any section."""
    fields = {name: value for name, value in stored.items() if name not in ROTARY}
    if isinstance(rope := stored.get("rope_parameters"), dict):
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in ROTARY}
    return fields


OURS = Format(DominoConfig.model_type, _is_ours, _own_fields, reads=_OurFields(), only={})
FORMATS = (OURS, EAGLE3, SPECULATORS, MUSE_GLIMMER, DFLASH_CONFIG)


def format_of(stored: StoredConfig) -> Format | None:
    """Return the format of a drafter's config.json; None if it is not a drafter that we can recognise.

    Example:
    ```python
    >>> from hf_domino.formats.registry import format_of
    >>> format_of({"model_type": "qwen3", "dflash_config": {"target_layer_ids": [1, 9, 17]}}).name
    'DFlash configuration (z-lab, SpecForge, Model-Optimizer)'

    ```
    """
    return next((found for found in FORMATS if found.matches(stored)), None)


def refuse_others(stored: StoredConfig) -> None:
    """Raise an error that names the method if a configuration is of one of [`OTHER_KINDS`]."""
    nested = stored.get(SECTION)
    places = (stored, nested if isinstance(nested, dict) else {})
    names = " ".join(str(place.get(field)) for place in places for field in NAMING_FIELDS).lower()
    if stored.get("markov_rank") == 0:  # without a Markov head, DeepSpec's class is plain DFlash
        names = names.replace("qwen3dspark", "")
    found = format_of(stored)
    is_markov = found in (SPECULATORS, DFLASH_CONFIG) and any(place.get("markov_rank") for place in places)
    is_read = dict.fromkeys((OTHER_EAGLE3, OTHER_DFLASH, OTHER_XPRESS), found is not None)
    is_read |= {OTHER_DSPARK: is_markov, OTHER_DFLY: found is DFLASH_CONFIG}
    for kind, pattern in OTHER_KINDS.items():
        fields = OTHER_FIELDS.get(kind, ())
        evidence = re.findall(pattern, names)
        evidence += [f"{field}={place[field]!r}" for place in places for field in fields if place.get(field)]
        if evidence and not is_read.get(kind):
            raise invalid_argument("the drafter's method", LOADED, f"{kind} ({evidence[0]})", CANNOT_RUN)

"""The formats that can be loaded, in the order in which they are tried, and methods that are rejected by name."""

from __future__ import annotations

import re
from typing import NamedTuple

from hf_domino._common.errors import invalid_argument
from hf_domino.formats.dflash_config import DFLASH_CONFIG, MUSE_GLIMMER, SECTION
from hf_domino.formats.eagle3 import EAGLE3
from hf_domino.formats.fields import CANNOT_RUN, Format, StoredConfig
from hf_domino.formats.ours import OURS
from hf_domino.formats.speculators import SPECULATORS

NAMING_FIELDS = ("architectures", "model_type", "speculators_model_type", "projector_type")
LOADED = "Domino, DFlash, DFlash 2, DSpark, DFly, XPress or EAGLE-3"
FORMATS = (OURS, EAGLE3, SPECULATORS, MUSE_GLIMMER, DFLASH_CONFIG)  # in the order in which they are tried
WRITTEN = {found.exported_as: found.write for found in reversed(FORMATS) if found.write}  # by `export(format=...)`


class Other(NamedTuple):
    """A method, or a layout of one, that we cannot load."""

    pattern: str  # in the names of its classes and types
    fields: tuple[str, ...] = ()  # that only it sets
    read_in: tuple[Format, ...] = ()  # our formats that read drafters of this method


OTHER_DSPARK = "DSpark in another layout"
OTHER_KINDS = {
    "P-EAGLE": Other("peagle", ("parallel_drafting",)),
    "EAGLE, not EAGLE-3": Other(r"eagle(?!3)"),
    "Medusa": Other("medusa", ("medusa_num_heads", "medusa_num_layers")),
    "DFlash or DSpark on Gemma": Other("gemma4dspark"),
    "DSpark with gated attention": Other("qwen35dspark"),
    "DFly in another layout": Other("dfly", read_in=(DFLASH_CONFIG,)),
    "DFlare": Other("dflare"),
    "XPress in another layout": Other("xpress", read_in=FORMATS),
    OTHER_DSPARK: Other(
        "dspark", ("markov_rank", "markov_head_type", "enable_confidence_head"), (SPECULATORS, DFLASH_CONFIG)
    ),
    "LiLiCorr": Other("lilicorr", ("lilicorr_enabled",)),
    "JetSpec in another layout": Other("jetspec"),
    "MTP": Other("mtp"),
    # These are recognised by name before any field is read, because fields have other meanings there.
    "EAGLE-3 in another layout": Other("eagle3", read_in=FORMATS),
    "DFlash in another layout": Other("dflash", read_in=FORMATS),
}


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
    has_markov_head = any(place.get("markov_rank") for place in places)
    found = format_of(stored)
    for kind, other in OTHER_KINDS.items():
        evidence = re.findall(other.pattern, names)
        evidence += [f"{field}={place[field]!r}" for place in places for field in other.fields if place.get(field)]
        is_read = found in other.read_in and (kind != OTHER_DSPARK or has_markov_head)
        if evidence and not is_read:
            raise invalid_argument("the drafter's method", LOADED, f"{kind} ({evidence[0]})", CANNOT_RUN)

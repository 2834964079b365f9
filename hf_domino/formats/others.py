"""Drafters of other kinds, recognised so that an error can name them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino.formats.fields import CANNOT_RUN
from hf_domino.formats.format import StoredConfig

NAMING_FIELDS = ("architectures", "model_type", "speculators_model_type", "projector_type")


@dataclass(frozen=True)
class OtherKind:
    """A kind of drafter that is not ours.

    Args:
        name (`str`): What its authors call it.
        words (`tuple[str, ...]`): Patterns of parts of the names that its classes and types have, in lower case.
        fields (`tuple[str, ...]`): Fields that only such a drafter sets.
    """

    name: str
    words: tuple[str, ...]
    fields: tuple[str, ...] = ()


OTHER_KINDS = (
    OtherKind("P-EAGLE", ("peagle",), ("parallel_drafting",)),
    OtherKind("EAGLE, not EAGLE-3", (r"eagle(?!3)",)),
    OtherKind("Medusa with lm_heads of its own", ("medusa",), ("medusa_num_heads", "medusa_num_layers")),
    OtherKind("DFlash 2", ("dflash2",), ("selector_rank", "conv_kernel_size")),
    OtherKind("DFlash or DSpark on Gemma", ("gemma4dspark",)),
    OtherKind("DSpark", ("dspark",), ("markov_rank", "markov_head_type", "enable_confidence_head")),
    OtherKind("LiLiCorr", ("lilicorr",), ("lilicorr_enabled",)),
    OtherKind("JetSpec", ("jetspec",)),
    OtherKind("MTP", ("mtp",)),
)


def refuse_others(stored: StoredConfig) -> None:
    """Refuse drafters of another kind by name.

    Args:
        stored (`Mapping`): A checkpoint's configuration.

    Raises:
        ValueError: If it is one of [`OTHER_KINDS`].
    """
    nested = stored.get("dflash_config")
    places = (stored, nested if isinstance(nested, dict) else {})
    names = " ".join(str(name).lower() for name in _names(places))
    if stored.get("markov_rank") == 0:  # without a Markov head DeepSpec's class is plain DFlash
        names = names.replace("qwen3dspark", "")
    for kind in OTHER_KINDS:
        evidence = next((found[0] for word in kind.words if (found := re.search(word, names))), None) or next(
            (f"{field}={place[field]!r}" for place in places for field in kind.fields if place.get(field)), None
        )
        if evidence is not None:
            raise refusal("the drafter's kind", "Domino, DFlash or EAGLE-3", f"{kind.name} ({evidence})", CANNOT_RUN)


def _names(places: tuple[StoredConfig, ...]) -> Iterator[Any]:
    for place in places:
        for field in NAMING_FIELDS:
            value = place.get(field) or ()
            yield from value if isinstance(value, list) else [value]

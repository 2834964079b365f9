"""What a format is: how to tell its configurations, read their fields, rename its tensors, and write them again."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig

StoredConfig = Mapping[str, Any]  # a config.json

# Stored beside a drafter's weights by some projects: patterns of tensor names.
TARGET_TENSORS = (
    r"^(model\.)?(embed_tokens|lm_head|verifier_lm_head|verifier_norm)\.weight$",
    r"^t2d$",  # follows from d2t; alone it says which rows of W2 are the drafter's
    r"^d2t$",  # of the whole vocabulary: else it is the drafter's
    r"(^|\.)rotary_emb\.inv_freq$",
)


def is_of_target(name: str) -> bool:
    """Whether a stored tensor is none of the drafter's weights."""
    return any(re.search(pattern, name) for pattern in TARGET_TENSORS)


@dataclass(frozen=True)
class Format:
    """How one kind of checkpoint stores drafters.

    Args:
        name (`str`): What errors call it.
        matches (`Callable`): Whether a configuration is of this format.
        fields (`Callable`): The fields of [`DominoConfig`] that such a configuration describes; raises a `ValueError`
            for what is missing, contradicts itself or cannot be run.
        stored (`Callable`, *optional*): The way back: the config.json that describes a drafter of a [`DominoConfig`],
            of which `dtype` is the weights'; raises a `ValueError` for what the format cannot hold. Tensors go out
            under our names. None for formats that are only read.
        renames (`Mapping`, *optional*): Patterns of stored tensor names -> what they are replaced with, one after the
            other.
        has_draft_vocabulary (`bool`, *optional*, defaults to `False`): Whether it stores `d2t` and `t2d`, so that a
            draft vocabulary can be written in it.
        runs_natively (`bool`, *optional*, defaults to `False`): Whether a pipeline of Transformers runs such a drafter
            without us.
    """

    name: str
    matches: Callable[[StoredConfig], bool]
    fields: Callable[[StoredConfig], dict[str, Any]]
    stored: Callable[[DominoConfig], dict[str, Any]] | None = None
    renames: Mapping[str, str] = field(default_factory=dict)
    has_draft_vocabulary: bool = False
    runs_natively: bool = False

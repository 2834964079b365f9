"""Our own checkpoints, as `save_pretrained` writes them: their config.json holds a [`DominoConfig`]."""

from __future__ import annotations

from collections.abc import Iterator

from hf_domino.configuration.domino_config import OF_TRANSFORMERS, DominoConfig
from hf_domino.configuration.from_target import ROTARY
from hf_domino.configuration.registry import all_fields
from hf_domino.formats.fields import Fields, Format, StoredConfig

ALWAYS_OURS = "draft_pool_size"  # in every file that we wrote, and in no other project's


class _OurFields:
    """The fields of all methods, including methods that are registered later."""

    def __iter__(self) -> Iterator[str]:
        return iter((*DominoConfig.__dataclass_fields__, *all_fields(), *OF_TRANSFORMERS, *ROTARY))


def _matches(stored: StoredConfig) -> bool:
    """Return whether a file is ours: another project's Domino has the same `model_type`, but other or fewer fields."""
    names = {name for name, value in stored.items() if value not in (None, False)}
    has_ours_alone = names <= all_fields().keys() | DominoConfig.__dataclass_fields__.keys() | OF_TRANSFORMERS
    return stored.get("model_type") == DominoConfig.model_type and (
        ALWAYS_OURS in stored or (has_ours_alone and "head_dim" in names)
    )


def _read(stored: StoredConfig) -> Fields:
    """Return all fields of a file except those of [`ROTARY`], which are read from any section."""
    fields = {name: value for name, value in stored.items() if name not in ROTARY}
    if isinstance(rope := stored.get("rope_parameters"), dict):
        fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in ROTARY}
    return fields


OURS = Format(name=DominoConfig.model_type, matches=_matches, read=_read, reads=_OurFields(), only={})

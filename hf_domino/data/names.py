"""Names in records that change the loss or the prompt, beside the fields that hold a text or a chat.

`NAMES` is the whole list: where each name is read, and where it is refused. A name that is not in it is taken for a
note, such as a topic or a source. Where a name is neither read nor refused, something else says the same already: the
ids of a row hold its system turn, and a chat template is given every message whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

# What a name may stand beside, or in.
IDS, CHAT, TEXT, MESSAGE = "`input_ids`", "a chat", "a text", "a message"
LOSS, PROMPT = "what is learned", "what the target reads"


class Name(NamedTuple):
    """What a name changes, where it is read, where it is refused, and what to write in its place."""

    changes: str
    read: tuple[str, ...]
    refused: tuple[str, ...]
    instead: str = ""


_OF_TOKENS = Name(LOSS, (IDS,), (CHAT, TEXT))
_WEIGHT = Name(LOSS, (IDS, CHAT, TEXT, MESSAGE), ())  # 1 or 0, as `has_loss` reads it
_OF_CHATS = Name(PROMPT, (CHAT,), (TEXT,))
_PACKED = Name(PROMPT, (), (IDS,), "Give every text as a row of its own.")
_MEDIA = Name(PROMPT, (), (CHAT,), "Contents are text: leave such records out.")
NAMES = {
    **dict.fromkeys(("prompt_length", "loss_mask", "labels", "completion_mask", "assistant_masks"), _OF_TOKENS),
    "attention_mask": _OF_TOKENS._replace(changes=PROMPT),
    **dict.fromkeys(("position_ids", "seq_lengths"), _PACKED),
    **dict.fromkeys(("weight", "train", "training", "loss", "loss_weight", "loss_scale"), _WEIGHT),
    "train_detail": Name(LOSS, (), (MESSAGE,), "A message is learned whole, or not at all (`train`)."),
    **dict.fromkeys(("system", "system_prompt", "tools", "chat_template_kwargs"), _OF_CHATS),
    "functions": Name(PROMPT, (), (CHAT,), "Name them `tools`, each with `type` and `function`."),
    "documents": Name(PROMPT, (), (CHAT,), "Put them into `chat_template_kwargs`, or into a message."),
    **dict.fromkeys(("images", "videos", "audios"), _MEDIA),
}
WEIGHTS = tuple(name for name, known in NAMES.items() if known is _WEIGHT)


def check_names(fields: Mapping[str, Any], where: str, changes: tuple[str, ...] = (LOSS, PROMPT)) -> None:
    """Refuse the fields of a record or a message that change the loss or the prompt and are not read there.

    Empty ones say nothing, and neither do `labels` that are no list: those are the class of a text.
    """
    for name, known in NAMES.items():
        value = fields.get(name)
        is_class = name == "labels" and not isinstance(value, list)
        if where not in known.refused or known.changes not in changes or value in (None, "", [], {}) or is_class:
            continue
        instead = known.instead or f"It is read beside {' and '.join(known.read)}: write it there, or leave it out."
        said = f"changes {known.changes}, and is not read in {where}"
        raise ValueError(f"field `{name}` {said}, got {_short(value)}. {instead}")


def has_loss(fields: Mapping[str, Any], can_learn: bool = True) -> bool:
    """Say whether a record or a message is learned: its weights are 1 or true, or 0 or false.

    What another than the assistant says cannot be learned (`can_learn`), so a weight of 1 there is refused.
    """
    learned = True
    for name in WEIGHTS:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or value not in (0, 1):
            raise ValueError(f"field `{name}` must be 0 or 1 (false or true), got {_short(value)}. Leave it out for 1.")
        if value and not can_learn:
            raise ValueError(f"field `{name}` must be 0, got {_short(value)}: only what the assistant says is learned.")
        learned = learned and bool(value)
    return learned


def read_system(record: Mapping[str, Any]) -> str | None:
    """Read the system turn that a record names beside its chat; None if there is none."""
    given = [record[name] for name in ("system", "system_prompt") if record.get(name)]
    if not given:
        return None
    if not isinstance(given[0], str) or given[1:] not in ([], given[:1]):
        raise ValueError(f"field `system` (or `system_prompt`) must be one string, got {_short(given)}.")
    return given[0]


def read_template_fields(record: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that are arguments of the chat template, objects or JSON of them, without empty ones."""
    read = {}
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = record.get(name) or kind()
        with suppress(json.JSONDecodeError):
            value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, kind):
            expected = "a list of objects" if kind is list else "an object"
            raise ValueError(f"field `{name}` must be {expected}, or JSON of it, got {_short(value)}.")
        if value:
            read[name] = value
    return read


def template_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Turn fields that [`read_template_fields`] read into arguments of the chat template."""
    tools = {"tools": fields["tools"]} if "tools" in fields else {}
    return {**fields.get("chat_template_kwargs", {}), **tools}


def _short(value: Any) -> str:
    return str(value)[:60]

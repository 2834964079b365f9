"""List the fields of records that change the loss or the prompt, besides those that hold the text or the chat.

`NAMES` lists all of them, and says where each field is read and where it is an error. Any other field is taken for a
note, such as a topic or a source, and ignored. If a listed field is neither read nor an error somewhere, the record
already has its information there: token ids include the system turn, and a chat template gets every message with all
its fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from hf_domino._common.notices import notice_once

Fields = Mapping[str, Any]  # fields of a record or a message, or variables of a chat template, by name
# Where a field can occur: in a record with one of the first three, or in a message.
IDS = "`input_ids`"
CHAT = "a chat"
TEXT = "a text"
MESSAGE = "a message"
# What a field can change.
LOSS = "what is learned"
PROMPT = "what the target reads"


class Name(NamedTuple):
    """What a field changes, where it is read, where it is an error, and what to do instead."""

    changes: str
    read: tuple[str, ...]
    refused: tuple[str, ...]
    instead: str = ""


_OF_TOKENS = Name(LOSS, (IDS,), (CHAT, TEXT))
_WEIGHT = Name(LOSS, (IDS, CHAT, TEXT, MESSAGE), ())  # 1 or 0, which `has_loss` reads
_OF_CHATS = Name(PROMPT, (CHAT,), (TEXT,))
_PACKED = Name(PROMPT, (), (IDS,), "Give each text as a record of its own.")
_MEDIA = Name(PROMPT, (), (CHAT,), "Only text is supported: leave such records out.")
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
WEIGHTS = tuple(name for name, rule in NAMES.items() if rule is _WEIGHT)


def check_names(fields: Fields, where: str, changes: tuple[str, ...] = (LOSS, PROMPT)) -> None:
    """Raise a `ValueError` if a field of a record or a message changes the loss or the prompt and is not read there.

    Empty fields are ignored, and so are `labels` that are not a list, because those hold the class of a text.
    """
    for name, rule in NAMES.items():
        value = fields.get(name)
        is_class = name == "labels" and not isinstance(value, list)
        if where not in rule.refused or rule.changes not in changes or value in (None, "", [], {}) or is_class:
            continue
        instead = rule.instead or f"It is read beside {' and '.join(rule.read)}: write it there, or leave it out."
        said = f"changes {rule.changes}, and is not read in {where}"
        raise ValueError(f"field `{name}` {said}, got {_short(value)}. {instead}")


def has_loss(fields: Fields, can_learn: bool = True) -> bool:
    """Return whether a record or a message is learned: yes, unless one of its weights is 0 or false.

    Another number, such as the loss that a model had on the text, is a note. Only the assistant's messages can be
    learned (`can_learn`), so a weight of 1 elsewhere is an error.
    """
    learned = True
    for name in WEIGHTS:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, (int, float)):
            raise ValueError(f"field `{name}` must be 0 or 1 (false or true), got {_short(value)}. Leave it out for 1.")
        if value not in (0, 1):
            notice_once(f"`{name}` of some records is not 0 or 1, so it is taken for a note: they are learned whole.")
            continue
        if value and not can_learn:
            raise ValueError(f"field `{name}` must be 0, got {_short(value)}: only what the assistant says is learned.")
        learned = learned and bool(value)
    return learned


def read_system(record: Fields) -> str | None:
    """Read the system turn that a record has in a field of its own; return None if there is none."""
    given = [record[name] for name in ("system", "system_prompt") if record.get(name)]
    if not given:
        return None
    if not isinstance(given[0], str) or given[1:] not in ([], given[:1]):
        raise ValueError(f"field `system` (or `system_prompt`) must be one string, got {_short(given)}.")
    return given[0]


def read_template_fields(record: Fields) -> dict[str, Any]:
    """Read the fields that are arguments of the chat template, given as objects or as JSON; leave out empty ones."""
    read = {}
    fields = (("tools", list, "a list of objects"), ("chat_template_kwargs", dict, "an object"))
    for name, expected_type, expected in fields:
        value = record.get(name) or expected_type()
        if isinstance(value, str):
            with suppress(json.JSONDecodeError):
                value = json.loads(value)
        if not isinstance(value, expected_type):
            raise ValueError(f"field `{name}` must be {expected}, or JSON of it, got {_short(value)}.")
        if value:
            read[name] = value
    return read


def template_arguments(fields: Fields) -> dict[str, Any]:
    """Turn the fields from [`read_template_fields`] into arguments of the chat template."""
    arguments = dict(fields.get("chat_template_kwargs", {}))
    if "tools" in fields:
        arguments["tools"] = fields["tools"]
    return arguments


def _short(value: Any) -> str:
    return str(value)[:60]

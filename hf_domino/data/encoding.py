"""Encode records as training examples: the formats that a record can have, and where each of them has loss.

An example is `{"input_ids": [...], "loss_mask": [...]}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import contains
from typing import Any

from hf_domino.data.chat import (
    UNALIGNABLE,
    UNANSWERED,
    Example,
    encode_chat,
    field_of,
    read_messages,
    read_string,
    with_own_system,
)
from hf_domino.data.names import (
    CHAT,
    IDS,
    TEXT,
    Fields,
    check_names,
    has_loss,
    read_system,
    read_template_fields,
    template_arguments,
)

MASKS = ("loss_mask", "completion_mask", "assistant_masks", "attention_mask", "labels")
UNLABELLED = -100  # as Transformers marks tokens without loss
BEFORE_A_TEXT = "\n.a"  # characters that the beginning of a text rarely merges with
NEEDED = "`text`, `prompt` and `completion`, `messages`, `conversations` or `input_ids`"


def encode_record(record: Fields, tokenizer: Any, template_kwargs: Fields) -> list[Example]:
    """Encode a record as examples of full length; some conversations give more than one."""
    if "input_ids" in record:
        check_names(record, IDS)
        example = _read_ids(record) if has_loss(record) else dict(UNALIGNABLE)
        return [example]
    if tokenizer is None:
        raise ValueError("needs a tokenizer, got none: pass the target's, or give records with `input_ids`.")
    name = field_of(record, NEEDED)
    is_chat = name in ("messages", "conversations") or isinstance(record[name], list)
    where = CHAT if is_chat else TEXT
    check_names(record, where)
    if not has_loss(record):
        return [dict(UNALIGNABLE)]
    if name == "text":
        return [_supervised(encode_text(read_string(record, name), tokenizer))]
    if not is_chat:
        prompt_ids = encode_text(read_string(record, name), tokenizer, goes_on=True)
        completion_ids = encode_continuation(_answer(record), prompt_ids, tokenizer)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        if completion_ids[-1:] != end:
            completion_ids += end
        return [_supervised(prompt_ids + completion_ids, start=len(prompt_ids))]
    messages = with_own_system(read_messages(record, name), read_system(record))
    start = 0
    if name == "prompt":  # if the prompt has messages, the completion has messages, too, or the assistant's text
        start = len(messages)
        if isinstance(record.get("completion"), list):
            messages += read_messages(record, "completion")
        else:
            messages.append({"role": "assistant", "content": _answer(record)})
    arguments = {**template_kwargs, **template_arguments(read_template_fields(record))}
    return encode_chat(messages, tokenizer, arguments, start)


def encode_text(text: str, tokenizer: Any, goes_on: bool = False) -> list[int]:
    """Encode a text the way the target reads it, with the tokens that its tokenizer adds at both ends, each once.

    Args:
        text (`str`): The text. If it already begins or ends with the tokenizer's own tokens, they are not added again.
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        goes_on (`bool`, *optional*, defaults to `False`): Whether more text follows, so that nothing is added at the
            end.
    """
    some = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    begin = next((start for start in range(len(whole)) if whole[start : start + len(some)] == some), 0)
    front = whole[:begin]
    behind = whole[begin + len(some) :]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids[: len(front)] == front:
        front = []
    if goes_on or ids[len(ids) - len(behind) :] == behind:
        behind = []
    return front + ids + behind


def encode_continuation(text: str, before: Sequence[int], tokenizer: Any) -> list[int]:
    """Encode a text that follows other tokens, so that all of them decode to both texts without a space between.

    Tokenizers with SentencePiece's marks put a space in front of every text that they encode. Behind other text it
    changes the text, so it is left out: the text is encoded behind a character that it does not merge with.
    """
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not before:
        return ids
    wanted = tokenizer.decode(before, skip_special_tokens=True) + text
    found = [ids]
    for character in BEFORE_A_TEXT:
        front, whole = (
            tokenizer(each, add_special_tokens=False)["input_ids"] for each in (character, character + text)
        )
        if whole[: len(front)] == front:
            found.append(whole[len(front) :])
    fitting = (each for each in found if tokenizer.decode([*before, *each], skip_special_tokens=True) == wanted)
    return next(fitting, ids)


def _supervised(ids: list[int], start: int = 0) -> Example:
    return {"input_ids": list(ids), "loss_mask": [int(position >= start) for position in range(len(ids))]}


def _read_ids(record: Fields) -> Example:
    """Read token ids, with loss on the tokens that every mask of the record includes."""
    ids = record["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"field `input_ids` must be a list of token ids, got {str(ids)[:60]}.")
    start = record.get("prompt_length", 0)
    if type(start) is not int or not 0 <= start <= len(ids):
        raise ValueError(f"field `prompt_length` must be in [0, {len(ids)}], got {start!r}.")
    loss_mask = _supervised(ids, start)["loss_mask"]
    for name in MASKS:
        values = record.get(name)
        if values is None:
            continue
        blank = 0
        other = "1"
        marked = [1] * len(ids)
        if name == "labels":
            blank = UNLABELLED
            other = "that of `input_ids`"
            marked = ids
        allowed = [(blank, value) for value in marked]
        if not isinstance(values, list) or len(values) != len(ids) or not all(map(contains, allowed, values)):
            raise ValueError(f"field `{name}` must be {len(ids)} numbers, {blank} or {other}, got {str(values)[:60]}.")
        loss_mask = [int(before and value != blank) for before, value in zip(loss_mask, values, strict=True)]
    attended = record.get("attention_mask")
    if attended is not None and not all(attended):
        num_read = sum(attended)
        first = attended.index(1) if num_read else 0
        if not all(attended[first : first + num_read]):
            raise ValueError(
                "field `attention_mask` must be 0 only before and after the text, got a 0 inside it: split the record."
            )
        ids = ids[first : first + num_read]
        loss_mask = loss_mask[first : first + num_read]
    return {"input_ids": ids, "loss_mask": loss_mask}


def _answer(record: Fields) -> str:
    if record.get("completion") is None:
        raise ValueError(f"field `completion` must be a string, got None. {UNANSWERED}")
    return read_string(record, "completion")

"""Encode the prompts of a benchmark: plain texts, or conversations if the tokenizer has a chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hf_domino.data.encoding import encode_text
from hf_domino.pair import Pair


def encode(tokenizer: Any, batch: Sequence[dict[str, Any]]) -> Any:
    """Return token ids and attention mask `[B, T]` of a batch, padded on the left."""
    return tokenizer.pad([encode_one(tokenizer, prompt) for prompt in batch], padding_side="left", return_tensors="pt")


def inputs_of(pair: Pair, batch: Sequence[dict[str, Any]]) -> Any:
    """Return the token ids and the attention mask of a batch, on the target's device."""
    return encode(pair.tokenizer, batch).to(pair.target.device)


def encode_one(tokenizer: Any, prompt: Mapping[str, Any], **variables: Any) -> Any:
    """Return token ids and attention mask `[T]` of one prompt; `variables` go to the chat template."""
    if "messages" not in prompt:
        ids = encode_text(prompt["text"], tokenizer, goes_on=True)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError('prompts with "messages" need a tokenizer with a chat template: give prompts with "text".')
    own = prompt.get("chat_template_kwargs") or {}
    return tokenizer.apply_chat_template(
        prompt["messages"], prompt.get("tools"), add_generation_prompt=True, return_dict=True, **{**own, **variables}
    )


def source(prompt: dict[str, Any]) -> list[Any]:
    """Return what identifies a prompt in a result: module, offset and hash."""
    if "messages" in prompt:
        text = json.dumps(prompt["messages"])
    else:
        text = prompt["text"]
    digest = prompt.get("sha256") or hashlib.sha256(text.encode()).hexdigest()
    return [prompt.get("module"), prompt.get("offset"), digest]

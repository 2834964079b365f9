"""Encode the prompts of a benchmark in batches, and name them in results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from hf_domino.data.names import read_template_fields
from hf_domino.data.prompts import Asked, encode_prompt
from hf_domino.pair import Pair


def encode(tokenizer: Any, batch: Sequence[Asked]) -> Any:
    """Return token ids and attention mask `[B, T]` of a batch, padded on the left."""
    ids = [encode_prompt(prompt, tokenizer) for prompt in batch]
    encoded = {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}
    return tokenizer.pad(encoded, padding_side="left", return_tensors="pt")


def inputs_of(pair: Pair, batch: Sequence[Asked]) -> Any:
    """Return the token ids and the attention mask of a batch, on the target's device."""
    return encode(pair.tokenizer, batch).to(pair.target.device)


def source(prompt: Asked) -> list[Any]:
    """Return what identifies a prompt in a result: module, offset and hash."""
    if "messages" in prompt:
        text = json.dumps(prompt["messages"])
        if fields := read_template_fields(prompt):
            text += json.dumps(fields, sort_keys=True)
    else:
        text = prompt["text"]
    digest = prompt.get("sha256") or hashlib.sha256(text.encode()).hexdigest()
    return [prompt.get("module"), prompt.get("offset"), digest]

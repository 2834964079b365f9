"""Prompts of a benchmark: texts, or conversations where the tokenizer has a chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_domino.pair import read_prompts


def read_batches(path: Path, num_prompts: int, batch_size: int) -> list[list[dict[str, Any]]]:
    """Read the first prompts of a file, in batches of which the last may be smaller."""
    prompts = read_prompts(path)[:num_prompts]
    if not prompts:
        raise ValueError(f"--prompts must hold at least one prompt, got none in {path}.")
    return [prompts[start : start + batch_size] for start in range(0, len(prompts), batch_size)]


def encode(tokenizer: Any, batch: Sequence[dict[str, Any]]) -> Any:
    """Token ids and attention mask `[B, T]` of a batch, padded on the left."""
    return tokenizer.pad([encode_one(tokenizer, prompt) for prompt in batch], padding_side="left", return_tensors="pt")


def encode_one(tokenizer: Any, prompt: Mapping[str, Any], **variables: Any) -> Any:
    """Token ids and attention mask `[T]` of one prompt; `variables` are those of the chat template."""
    if "messages" not in prompt:
        return tokenizer(prompt["text"])
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError('prompts with "messages" need a tokenizer with a chat template: give prompts with "text".')
    return tokenizer.apply_chat_template(
        prompt["messages"], prompt.get("tools"), add_generation_prompt=True, return_dict=True, **variables
    )


def source(prompt: dict[str, Any]) -> list[Any]:
    """The name of a prompt in a row: module, offset and hash."""
    text = json.dumps(prompt["messages"]) if "messages" in prompt else prompt["text"]
    digest = prompt.get("sha256") or hashlib.sha256(text.encode()).hexdigest()
    return [prompt.get("module"), prompt.get("offset"), digest]

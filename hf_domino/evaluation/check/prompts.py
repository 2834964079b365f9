"""Prepare the prompts of a self-test: texts, chats in each mode of the chat template, or token ids.

Shapes: T prompt tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer, PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino.data.names import read_template_fields
from hf_domino.data.prompts import bundled_prompts, encode_prompt

NUM_BUNDLED = 12  # a few texts make a verdict uncertain; if the first ones are enough, the others are not used
# Variables with which chat templates switch reasoning on and off.
THINKING_SWITCHES = ("enable_thinking", "thinking")
TEXT = "text"
CHAT = "chat"
THINKING = "chat, thinking"
NOT_THINKING = "chat, not thinking"


class Prompt(NamedTuple):
    """Token ids `[1, T]` of one prompt, and its mode: text, chat, or chat with or without thinking."""

    mode: str
    input_ids: torch.Tensor


def prepare_prompts(
    target: PreTrainedModel, tokenizer: Any = None, prompts: Sequence[Any] | None = None
) -> list[Prompt]:
    """Turn the prompts of [`check_fit`] into token ids; with a chat template, a text becomes a user message."""
    if isinstance(prompts, str) or (prompts is not None and not len(prompts)):
        raise invalid_argument("prompts", "a list of at least one prompt", prompts, "Leave it out for defaults.")
    if tokenizer is None and (prompts is None or not all(map(_is_ids, prompts))):
        path = getattr(target, "name_or_path", "")
        if not path:
            remedy = "Pass tokenizer=..., or prompts as lists of token ids."
            raise invalid_argument(
                "tokenizer", "given for a target that was not loaded from a folder or the Hub", None, remedy
            )
        tokenizer = AutoTokenizer.from_pretrained(path)
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if prompts is None:
        prompts = bundled_prompts(has_template)[:NUM_BUNDLED]
    prepared = [
        Prompt(mode, torch.as_tensor(ids, dtype=torch.long).view(1, -1))
        for prompt in prompts
        for mode, ids in _prepare(prompt, tokenizer, has_template).items()
    ]
    for index, ready in enumerate(prepared):
        if not ready.input_ids.numel():
            raise invalid_argument(f"prompts[{index}]", "of at least one token", "none", "Leave the empty prompt out.")
    return prepared


def _is_ids(prompt: Any) -> bool:
    is_list = isinstance(prompt, list | tuple)
    return isinstance(prompt, torch.Tensor) or (is_list and all(isinstance(token, int) for token in prompt))


def _prepare(prompt: Any, tokenizer: Any, has_template: bool) -> dict[str, Any]:
    """Return the token ids of a prompt by mode; a conversation is encoded in each mode of the chat template."""
    if _is_ids(prompt):
        return {TEXT: prompt}
    if isinstance(prompt, str) and not has_template:
        prompt = {"text": prompt}
    elif isinstance(prompt, str):
        prompt = {"messages": [{"role": "user", "content": prompt}]}
    elif not isinstance(prompt, dict):
        prompt = {"messages": list(prompt)}
    is_chat = "messages" in prompt
    for switch in THINKING_SWITCHES:
        if is_chat and has_template and re.search(rf"\b{switch}\b", str(tokenizer.chat_template)):
            own = read_template_fields(prompt).get("chat_template_kwargs", {})
            if switch in own:
                return {THINKING if own[switch] else NOT_THINKING: encode_prompt(prompt, tokenizer)}
            modes = [prompt | {"chat_template_kwargs": own | {switch: value}} for value in (True, False)]
            on, off = (encode_prompt(mode, tokenizer) for mode in modes)
            if on != off:  # otherwise, the word in the template means something else
                return {THINKING: on, NOT_THINKING: off}
    mode = CHAT if is_chat else TEXT
    return {mode: encode_prompt(prompt, tokenizer)}

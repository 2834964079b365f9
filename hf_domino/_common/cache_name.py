"""The name of a model's cache in arguments and outputs: `past_key_values`, or `cache` since Transformers 5.24."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

_NAMES = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _NAMES else "past_key_values"

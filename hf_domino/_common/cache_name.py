"""What Transformers calls a model's cache, among arguments and in outputs: `past_key_values`, `cache` from 5.24 on."""

from __future__ import annotations

from dataclasses import fields

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in {field.name for field in fields(CausalLMOutputWithPast)} else "past_key_values"

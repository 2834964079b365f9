"""What a caller makes the default dtype or device changes no text."""

from __future__ import annotations

import contextlib

import pytest
import torch
from builders import left_padded
from oracle import oracle
from transformers import WatermarkingConfig

import hf_domino

PAD = 2
OPTIONS = {"max_new_tokens": 12, "eos_token_id": 1, "pad_token_id": PAD}
# A device that holds nothing: whatever comes to lie there by default is missed at once.
DEFAULTS = {"bfloat16": torch.bfloat16, "meta": torch.device("meta")}
CALLS = {
    "plain": {},
    "drawn": {"do_sample": True, "top_h": 0.9},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.513, seeding_scheme="lefthash")},
    "length penalty": {"exponential_decay_length_penalty": (2, 1.0137)},
    "biases": {"sequence_bias": [[[token, 64 - token], 1.3] for token in range(4, 60)]},
    "penalties": {"repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2, "min_new_tokens": 9},
    "copies": {"prompt_lookup_num_tokens": 8},
    "static": {"cache_implementation": "static"},
}
FIELDS = [{"draft_pool_size": None}, {"draft_tree_size": 11}, {"draft_length": "adaptive"}]
FIELDS += [{"projector_type": kind} for kind in ("dflash", "eagle3")]


@contextlib.contextmanager
def default(value):
    """A default dtype, or device, inside the block."""
    if isinstance(value, torch.device):
        with value:
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(value)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def check(target, drafter, rows, value, options):
    torch.manual_seed(3)
    lengths = (9, 20)[2 - rows :]
    ids, mask = left_padded([torch.randint(4, 64, (length,)) for length in lengths], PAD)
    options, texts = {"do_sample": False} | OPTIONS | options, []
    ours = ("prompt_lookup_num_tokens", "cache_implementation")
    for assistant in (None, drafter):
        kwargs = {name: value for name, value in options.items() if assistant is not None or name not in ours}
        with oracle(target, ids, 0.7, texts[0]) if texts else contextlib.nullcontext(), default(value):
            torch.manual_seed(5)
            texts.append(target.generate(ids, attention_mask=mask, assistant_model=assistant, **kwargs))
    assert torch.equal(*texts)


@pytest.mark.parametrize("value", DEFAULTS)
@pytest.mark.parametrize("name", CALLS)
def test_calls(tiny_qwen3, tiny_drafter, name, value):
    check(tiny_qwen3, tiny_drafter, 1 if name == "static" else 2, DEFAULTS[value], CALLS[name])


@pytest.mark.parametrize("value", DEFAULTS)
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: " ".join(map(str, fields.values())))
def test_drafters(tiny_qwen3, make_drafter, fields, value):
    check(tiny_qwen3, make_drafter(tiny_qwen3, **fields), 1, DEFAULTS[value], CALLS["watermark"])


@pytest.mark.parametrize("value", DEFAULTS)
def test_tables(tiny_qwen3, value):
    check(tiny_qwen3, hf_domino.recycling(tiny_qwen3), 1, DEFAULTS[value], {})

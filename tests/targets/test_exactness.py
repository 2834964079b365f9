"""Blocks have the bits of plain decode steps with packed weights, family by family, in bfloat16 and float32."""

from __future__ import annotations

import pytest
import torch
from families import build

from hf_domino.targets.attention import adds_up_evenly
from hf_domino.targets.exactness import EQUAL, EQUAL_TO_PACKED, UP_TO_ROUNDING, measure_exactness

pytestmark = pytest.mark.transformers

EXACT = [
    "cohere",
    "gemma3_text",
    "glm4",
    "gpt_neox",
    "gptj",
    "granite",
    "lfm2",
    "llama",
    "mistral",
    "olmo2",
    "opt",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
    "starcoder2",
]
# Families whose float32 differs, and the module that differs first: products that are not linear layers of PyTorch
# (GPT-2, Falcon), routers of experts, attention that is not sdpa (Gemma 2), and recurrent layers.
INEXACT = {
    "falcon": "query_key_value",
    "gemma2": "o_proj",
    "gpt2": "c_attn",
    "mixtral": "mlp.gate",
    "qwen3_moe": "mlp.gate",
    "qwen3_next": "linear_attn",
}


@pytest.fixture(autouse=True)
def packed(monkeypatch):
    monkeypatch.setenv("HF_DOMINO_PACKED", "1")
    if not adds_up_evenly(16, torch.get_num_threads()):
        pytest.skip("this processor adds up in another order in wider products")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", EXACT)
def test_blocks_have_the_bits_of_plain_steps(model_type, dtype):
    target = build(model_type).to(dtype)
    if target.config._attn_implementation != "sdpa":
        pytest.skip("this version of transformers has another attention for it")
    exactness = measure_exactness(target)
    assert exactness.word in (EQUAL, EQUAL_TO_PACKED), exactness


@pytest.mark.parametrize("model_type", INEXACT)
def test_a_family_that_rounds_differently_names_the_module(model_type):
    exactness = measure_exactness(build(model_type))
    assert exactness.word == UP_TO_ROUNDING
    assert INEXACT[model_type] in str(exactness)

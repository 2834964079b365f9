"""Shared fixtures: tiny random models in fp32. Random weights accept little; losslessness must not depend on it."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

SEED = 0
VOCAB_SIZE = 64
EOS, PAD, MASK = 1, 2, 3

TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide enough that greedy text of a random model varies
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Start every test from the same random state."""
    torch.manual_seed(SEED)


@pytest.fixture(scope="session")
def tiny_qwen3() -> PreTrainedModel:
    """A random Qwen3 target with tied embeddings, in fp32 and evaluation mode. Shared: do not modify it."""
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **TINY)).eval()


@pytest.fixture(scope="session")
def tiny_llama() -> PreTrainedModel:
    """A random Llama target with an lm_head of its own, in fp32 and evaluation mode. Shared: do not modify it."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **TINY)).eval()


@pytest.fixture
def tiny_drafter(tiny_qwen3: PreTrainedModel) -> PreTrainedModel:
    """A random Domino drafter of two layers and block size 6 for `tiny_qwen3`; fits `tiny_llama` in all but its name."""
    return build_drafter(tiny_qwen3)


def build_drafter(target: PreTrainedModel, **overrides) -> PreTrainedModel:
    """Build a random fp32 drafter for a tiny target.

    Args:
        target (`PreTrainedModel`): The target the drafter must fit.
        overrides: Fields of `DominoConfig` to set in place of the tiny defaults.
    """
    from hf_domino import DominoConfig, DominoDraftModel

    fields = {
        "num_hidden_layers": 2,
        "block_size": 6,
        "mask_token_id": MASK,
        "emb_dim": 16,
        "gru_hidden_dim": 16,
        "initializer_range": 0.2,
    }
    torch.manual_seed(SEED + 1)
    drafter = DominoDraftModel(DominoConfig.for_target(target.config, **(fields | overrides))).eval()
    if drafter.has_correction_head:
        torch.nn.init.normal_(drafter.embed_proj[2].weight, std=0.2)  # fresh corrections are zero: nothing to test
    return drafter


@pytest.fixture
def make_drafter():
    """The function `build_drafter(target, **overrides)`, for tests that need another target, block size or convention."""
    return build_drafter

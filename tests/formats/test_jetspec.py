"""JetSpec's heads: a DFlash drafter whose layers are all causal inside a block, against a plain loop over positions."""

from __future__ import annotations

import pytest
import torch
from released import WINDOWED, our_drafter, reduced, stored_tensors, write_checkpoint

from hf_domino import DominoDraftModel

pytestmark = pytest.mark.transformers


@pytest.fixture
def head(tiny_qwen3, tmp_path):
    """A small head in the layout of its authors, with random weights."""
    stored = reduced(WINDOWED["jetspec"])
    tensors = stored_tensors(our_drafter(tiny_qwen3, stored), {})
    return DominoDraftModel.from_pretrained(write_checkpoint(tmp_path, stored, tensors), dtype=torch.float32)


def normed(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps) * weight


def turned(vector: torch.Tensor, position: int, base: float) -> torch.Tensor:
    """Rotate a vector `[D]` to a position."""
    half = len(vector) // 2
    angles = position * base ** (-torch.arange(half) / half)
    first, second = vector[:half], vector[half:]
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()))


def by_loops(head, features: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """The hidden states `[K, H]` of a block behind S context positions, one query after another."""
    weights, config = head.state_dict(), head.config
    eps, base, width = config.rms_norm_eps, config.rope_parameters["rope_theta"], config.head_dim
    context = normed(features @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    block = noise
    for index in range(config.num_hidden_layers):
        own = {
            name.removeprefix(f"layers.{index}."): one for name, one in weights.items() if f"layers.{index}." in name
        }
        read = normed(block, own["input_layernorm.weight"], eps)
        rows = []
        for query in range(len(block)):
            seen = torch.cat((context, read[: query + 1]))  # the whole context, and no later position of the block
            heads = []
            for number in range(config.num_attention_heads):
                group = number // (config.num_attention_heads // config.num_key_value_heads)
                parts = [slice(start * width, (start + 1) * width) for start in (number, group)]
                asked = read[query] @ own["self_attn.q_proj.weight"][parts[0]].T
                asked = turned(normed(asked, own["self_attn.q_norm.weight"], eps), len(context) + query, base)
                keys = normed(seen @ own["self_attn.k_proj.weight"][parts[1]].T, own["self_attn.k_norm.weight"], eps)
                keys = torch.stack([turned(key, position, base) for position, key in enumerate(keys)])
                scores = (keys @ asked / width**0.5).softmax(0)
                heads.append(scores @ (seen @ own["self_attn.v_proj.weight"][parts[1]].T))
            rows.append(torch.cat(heads) @ own["self_attn.o_proj.weight"].T)
        block = block + torch.stack(rows)
        read = normed(block, own["post_attention_layernorm.weight"], eps)
        gate = torch.nn.functional.silu(read @ own["mlp.gate_proj.weight"].T)
        block = block + (gate * (read @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return normed(block, weights["norm.weight"], eps)


@torch.no_grad()
def test_a_position_sees_the_context_and_no_later_position_of_its_block(head):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(11, 64, generator=generator)
    noise = torch.randn(head.config.block_size, 32, generator=generator)
    context = head.fuse_context(features[None].split(32, dim=-1))
    positions = torch.arange(11 + len(noise))[None]
    found = head(noise[None], positions[:, 11:], context, positions[:, :11])[0]
    torch.testing.assert_close(found, by_loops(head, features, noise), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_text_stays_the_targets_own(head, tiny_qwen3, cache):
    prompts = torch.randint(4, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = tiny_qwen3.generate(prompts, **options)
    drafted = tiny_qwen3.generate(prompts, assistant_model=head, cache_implementation=cache, **options)
    assert torch.equal(drafted, plain)

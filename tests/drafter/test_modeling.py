"""The drafter as a module: forward with and without cache, saving, loading, dtypes."""

import json

import pytest
import torch
from builders import build_drafter
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.kinds.context import ContextCache

HIDDEN = 32
RELEASED_NAMES = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    "prefix_gru.weight_ih_l0",
    "prefix_gru.weight_hh_l0",
    "embed_proj.0.weight",
    "embed_proj.2.weight",
    *(
        f"layers.{i}.self_attn.{name}.weight"
        for i in (0, 1)
        for name in ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
    ),
    *(f"layers.{i}.mlp.{name}.weight" for i in (0, 1) for name in ("gate_proj", "up_proj", "down_proj")),
    *(f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("input_layernorm", "post_attention_layernorm")),
}


def test_tensor_names_are_the_releases(tiny_drafter, tmp_path):
    tiny_drafter.save_pretrained(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == RELEASED_NAMES
    assert "model_type" in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("auto", [False, True])
def test_round_trip(tiny_drafter, tmp_path, auto):
    tiny_drafter.save_pretrained(tmp_path)
    loaded = (AutoModel if auto else DominoDraftModel).from_pretrained(tmp_path)
    assert type(loaded) is DominoDraftModel
    assert type(AutoConfig.from_pretrained(tmp_path)) is DominoConfig
    assert loaded.config.to_diff_dict() == tiny_drafter.config.to_diff_dict() | {"dtype": "float32"}
    for name, tensor in tiny_drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_dflash_has_no_head(tiny_qwen3):
    twin = build_drafter(tiny_qwen3, projector_type="dflash")
    assert not twin.has_correction_head
    assert {name for name in RELEASED_NAMES if not name.startswith(("prefix_gru", "embed_proj"))} == set(
        twin.state_dict()
    )


def test_a_fresh_head_corrects_nothing(tiny_qwen3):
    drafter = DominoDraftModel(DominoConfig.for_target(tiny_qwen3.config))
    assert (
        drafter.embed_proj(torch.randn(3, drafter.config.hidden_size + drafter.config.gru_hidden_dim)).abs().max() == 0
    )


def test_cached_context_equals_context_at_once(tiny_drafter):
    context, noise = torch.randn(1, 90, HIDDEN), torch.randn(1, 6, HIDDEN)
    positions = torch.arange(100)[None]
    whole = tiny_drafter(noise, positions[:, 90:96], context, positions[:, :90])
    cache = ContextCache(len(tiny_drafter.layers))
    for start, end in ((0, 50), (50, 51), (51, 90)):
        block = tiny_drafter(
            noise, positions[:, end : end + 6], context[:, start:end], positions[:, start:end], cache=cache
        )
    torch.testing.assert_close(block, whole)
    assert cache.lengths == [90]


def test_the_whole_block_sees_itself(tiny_drafter):
    noise, positions = torch.randn(1, 6, HIDDEN), torch.arange(6)[None]
    first = tiny_drafter(noise, positions)
    noise[:, -1] += 1.0
    assert (tiny_drafter(noise, positions)[:, 0] - first[:, 0]).abs().max() > 1e-4


def test_rotary_frequencies_stay_in_fp32(tiny_drafter):
    positions = torch.arange(3000, 3006)[None]
    exact = tiny_drafter._rotary(positions)
    rounded = tiny_drafter.to(torch.bfloat16)._rotary(positions)
    assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(exact, rounded, strict=True))


def test_gru_step_equals_the_whole_sequence(tiny_drafter):
    gru, embeds = tiny_drafter.prefix_gru, torch.randn(2, 5, HIDDEN)
    state, states = gru.initial_state(2), gru(embeds)
    torchs = torch.nn.GRU(HIDDEN, gru.hidden_size, bias=False, batch_first=True)
    torchs.load_state_dict(gru.state_dict())
    torch.testing.assert_close(states, torchs(embeds)[0])
    for index in range(5):
        advanced = gru.advance(gru.project_inputs(embeds)[:, index], state)
        state = gru.step(embeds[:, index], state)
        torch.testing.assert_close(state, states[:, index])
        torch.testing.assert_close(advanced, state)


def test_split_projection_equals_the_whole(tiny_drafter):
    head = tiny_drafter.embed_proj
    hidden, state = torch.randn(3, HIDDEN), torch.randn(3, tiny_drafter.config.gru_hidden_dim)
    split = head.expand(head.project_hidden(hidden) + head.project_state(state))
    torch.testing.assert_close(split, head(torch.cat((hidden, state), -1)))

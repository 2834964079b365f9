"""The drafter as a module: forward with and without cache, saving, loading, dtypes."""

import pytest
import torch
from builders import build_drafter

from hf_domino import DominoConfig, DominoDraftModel

HIDDEN = 32


def test_round_trip(tiny_drafter, tmp_path):
    tiny_drafter.save_pretrained(tmp_path)
    loaded = DominoDraftModel.from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == tiny_drafter.config.to_diff_dict() | {"dtype": "float32"}
    for name, tensor in tiny_drafter.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_a_fresh_head_corrects_nothing(tiny_qwen3):
    drafter = DominoDraftModel(DominoConfig.for_target(tiny_qwen3.config))
    assert (
        drafter.embed_proj(torch.randn(3, drafter.config.hidden_size + drafter.config.gru_hidden_dim)).abs().max() == 0
    )


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("domino", {"rope_interleaved": True}),
        ("domino", {"hidden_act": "gelu"}),
        ("domino", {"num_hidden_layers": 1}),
        ("dflash", {"rms_norm_eps": 1e-3, "attention_dropout": 0.5}),
        ("dflash", {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}),
        ("eagle3", {"qk_norm": False}),
        ("eagle3", {"norm_before_residual": True}),
        ("eagle3", {"head_dim": 4, "num_attention_heads": 8, "num_key_value_heads": 4}),
        ("dspark", {"markov_head_type": "vanilla"}),
        ("dflash2", {"selector_top_k": 3}),
    ],
)
def test_a_view_cannot_change_what_modules_were_built_with(tiny_qwen3, method, fields):
    made = {"eagle3": {"qk_norm": True}, "dspark": {"markov_head_type": "gated"}}.get(method, {})
    drafter = build_drafter(tiny_qwen3, projector_type=method, **made)
    with pytest.raises(ValueError, match=rf"of a view must be .*{next(iter(fields))}.* Load the drafter with another"):
        drafter.view(**fields)
    same = {name: getattr(drafter.config, name) for name in fields}
    assert drafter.view(draft_length="full", **same).config.draft_length == "full"


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

"""The probe: what verification rests on is measured on the target itself, and the self-test asks it."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from builders import build_drafter
from torch import nn
from transformers import BambaConfig, BambaForCausalLM

import hf_domino
from hf_domino.evaluation.check import width

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "attn_layer_indices": [1, 3]}
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}


@pytest.fixture
def clamped():
    """A target whose time step is clamped in blocks only, which its configuration does not say."""
    target = BambaForCausalLM(BambaConfig(**SIZES, **HEADS, **MAMBA)).eval()
    for module in target.modules():
        if hasattr(module, "time_step_limit"):
            nn.init.constant_(module.dt_bias, -8.0)
            nn.init.constant_(module.D, 0.05)
            module.time_step_limit = (0.1, float("inf"))
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_sound_targets_agree(tiny_llama, dtype, recwarn):
    probe = hf_domino.probe_width(copy.deepcopy(tiny_llama).to(dtype))
    assert probe.agrees
    assert 0 < probe.difference < probe.tolerance / 2
    assert not recwarn


def test_the_block_is_read_as_rounds_read_it(tiny_llama, monkeypatch):
    """Newer versions of Transformers run experts by other kernels in decoding than at prefill."""
    target = copy.deepcopy(tiny_llama)
    is_decoding, read = [False], []

    @contextlib.contextmanager
    def decoding():
        is_decoding[0] = True
        yield
        is_decoding[0] = False

    target._optimize_model_for_decode = decoding
    target.register_forward_pre_hook(lambda *_: read.append(is_decoding[0]))
    assert hf_domino.probe_width(target).agrees
    assert read == [False, True, False, *[True] * width.WIDTH]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fault_is_an_error_that_says_what_was_measured(clamped, dtype):
    words = r"plain decode steps, got '8 positions at once differ from plain decode steps by [\d.]+ .*drop"
    with pytest.raises(ValueError, match=words):
        hf_domino.probe_width(clamped.to(dtype))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda target: target.to(torch.bfloat16), "torch.bfloat16 rounds coarsely"),
        (lambda target: setattr(target.config, "quantization_config", {}), "Quantised activations"),
        (lambda target: setattr(target.config, "num_experts", 4), "choose other experts"),
    ],
)
def test_it_is_a_warning_where_it_may_be_rounding(clamped, change, words, monkeypatch):
    monkeypatch.setitem(width.TOLERANCES, torch.bfloat16, 1e-6)
    change(clamped)
    with pytest.warns(UserWarning, match=f"differ from plain decode steps by .*{words}.*without assistant_model"):
        assert not hf_domino.probe_width(clamped).agrees


def test_the_list_comes_first(clamped, monkeypatch):
    monkeypatch.setattr(width, "TOLERANCES", {torch.float32: 9.0})
    assert hf_domino.probe_width(clamped).agrees
    clamped.config.time_step_limit = (0.1, float("inf"))
    with pytest.raises(ValueError, match="time_step_limit must be"):
        hf_domino.probe_width(clamped)


def test_the_self_test_asks_it(clamped):
    with pytest.raises(ValueError, match="positions at once differ from plain decode steps"):
        hf_domino.check_fit(build_drafter(clamped), clamped, prompts=[[5, 9, 33]])


def test_nothing_is_changed(tiny_llama):
    state, config = torch.get_rng_state(), tiny_llama.generation_config.to_dict()
    first, second = hf_domino.probe_width(tiny_llama), hf_domino.probe_width(tiny_llama)
    assert first == second
    assert hf_domino.probe_width(tiny_llama, seed=1) != first
    assert torch.equal(torch.get_rng_state(), state)
    assert tiny_llama.generation_config.to_dict() == config

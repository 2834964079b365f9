"""A new drafter with the weights of its target's last layers: what it begins with, and what it cannot begin with."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.training import warm_start
from hf_domino.training.warm_start import start_from_target

pytestmark = pytest.mark.transformers

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
TEXT = torch.arange(4, 24)


@pytest.fixture(params=["llama", "qwen3"])
def started(request, tiny_qwen3, monkeypatch):
    """A target and a drafter of two layers that started from it, reading its last layer but two, in no order."""
    monkeypatch.setattr(warm_start, "REST", 0.0)
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**SIZES)).eval() if request.param == "llama" else tiny_qwen3
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "norm" in name and request.param == "llama":
                weight.uniform_(0.5, 1.5)
    count = target.config.num_hidden_layers
    layers = {"num_hidden_layers": 2, "conv_kernel_size": None if request.param == "llama" else 2}
    config = DominoConfig.for_target(target.config, **layers, target_layer_ids=[count - 3, 0])
    drafter = DominoDraftModel(config)
    start_from_target(drafter, target, TEXT.tolist())
    return target, drafter


@torch.no_grad()
def test_context_features_are_what_the_first_of_the_targets_last_layers_reads(started):
    target, drafter = started
    states = target.model(TEXT[None], output_hidden_states=True).hidden_states
    layer = target.model.layers[-2]
    captured = tuple(states[index + 1] for index in drafter.config.target_layer_ids)
    torch.testing.assert_close(drafter.fuse_context(captured), layer.input_layernorm(captured[0]))
    for own, layer in zip(drafter.layers, target.model.layers[-2:], strict=True):
        weights = {name: weight for name, weight in own.state_dict().items() if "_conv." not in name}
        for name, weight in layer.state_dict().items():
            assert torch.equal(weights.pop(name), weight)
        assert set(weights) <= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
        if weights:  # where the target norms no heads, they keep their size
            queries = layer.self_attn.q_proj(layer.input_layernorm(states[layer.self_attn.layer_idx]))
            size = queries.square().mean().sqrt().expand(8)
            torch.testing.assert_close(weights["self_attn.q_norm.weight"], size)
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)


@torch.no_grad()
def test_narrower_mlps_get_the_neurons_that_add_most_over_the_text():
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    loud = torch.tensor([[3, 47, 20, 11], [0, 1, 30, 45]])  # of the last two layers
    for layer, chosen in zip(target.model.layers[-2:], loud, strict=True):
        layer.mlp.down_proj.weight[:, chosen] *= 100
    config = DominoConfig.for_target(target.config, num_hidden_layers=2, intermediate_size=4, target_layer_ids=[0, 1])
    drafter = DominoDraftModel(config)
    start_from_target(drafter, target, TEXT.tolist())
    states = torch.randn(5, 32)
    for own, layer, chosen in zip(drafter.layers, target.model.layers[-2:], loud, strict=True):
        assert torch.equal(own.mlp.up_proj.weight, layer.mlp.up_proj.weight[chosen.sort().values])
        others = torch.ones(48, dtype=torch.bool).index_fill(0, chosen, False)
        layer.mlp.down_proj.weight[:, others] = 0
        torch.testing.assert_close(own.mlp(states), layer.mlp(states))
    assert not any(module._forward_pre_hooks for module in target.modules())


@torch.no_grad()
def test_biases_of_queries_keys_and_values_are_left_out():
    torch.manual_seed(0)
    target = Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval()
    attention = target.model.layers[-1].self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.bias.normal_(std=9.0)
    drafter = DominoDraftModel(DominoConfig.for_target(target.config, num_hidden_layers=1, target_layer_ids=[0, 2]))
    start_from_target(drafter, target, TEXT.tolist())
    own = drafter.layers[0].self_attn
    assert torch.equal(own.v_proj.weight, attention.v_proj.weight)
    states = target.model(TEXT[None], output_hidden_states=True).hidden_states[-2]
    keys = target.model.layers[-1].input_layernorm(states) @ attention.k_proj.weight.T
    torch.testing.assert_close(own.k_norm.weight, keys.square().mean().sqrt().expand(8))


def llama(**changes):
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changes))


def with_other(name: str, module: torch.nn.Module):
    """A Llama whose last layer has another module of that name."""
    target = llama()
    target.model.layers[-1].set_submodule(name, module)
    return target


class PackedLinear(torch.nn.Linear):
    """As quantisers have them: the weight alone does not say what it stands for."""

    def forward(self, states):
        return 2 * super().forward(states)


def with_bias():
    target = llama(attention_bias=True)
    target.model.layers[-1].self_attn.o_proj.bias.data.fill_(1)
    return target


REFUSED = {
    "no layers": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4)), {},
        "a target to start from must be a decoder with `layers`, got 'GPT2Model'",
    ),
    "too many": (llama, {"num_hidden_layers": 5}, "num_hidden_layers with start_from_target must be at most 4, got 5"),
    "wider": (llama, {"intermediate_size": 64}, r"gate_proj .* a plain Linear \(64, 32\) .* got 'Linear \(48, 32\)'"),
    "bias": (with_bias, {}, "o_proj of a target to start from must be a plain Linear"),
    "bias of a narrower one": (
        lambda: with_other("mlp.down_proj", torch.nn.Linear(48, 32)), {"intermediate_size": 8},
        "down_proj of a target to start from must be a plain Linear",
    ),
    "packed": (
        lambda: with_other("mlp.up_proj", PackedLinear(32, 48, bias=False)), {}, "up_proj .* got 'PackedLinear",
    ),
    "other norms": (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES)), {}, "input_layernorm .* got 'Gemma2RMSNorm"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_target_of_another_make_is_refused(case):
    make, changes, message = REFUSED[case]
    target = make()
    fields = {"num_hidden_layers": 1, "target_layer_ids": [0, 1]} | changes
    drafter = DominoDraftModel(DominoConfig.for_target(target.config, **fields))
    with pytest.raises(ValueError, match=message):
        start_from_target(drafter, target, [4, 5, 6])


def test_by_the_command_with_states_kept_or_not(recipe, train, tmp_path, capsys):
    start = recipe | {"start_from_target": True, "learning_rate": 0.0, "max_steps": 1}
    assert train(start, f"--output_dir={tmp_path / 'plain'}") == 0
    for number in range(2):  # the second time only the target's ends are there at first
        kept = (f"--output_dir={tmp_path / f'kept{number}'}", f"--cache_hidden_states={tmp_path / 'states'}")
        assert train(start, *kept) == 0
    plain, *others = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "kept0", "kept1"))
    assert others == [plain, plain]
    assert train(recipe | {"start_from_target": True, "drafter": str(tmp_path / "plain")}) == 2
    assert "start_from_target with drafter must be False, got True" in capsys.readouterr().err

"""PEFT's adapters on drafters, as Transformers has them: put in, saved, loaded again, checked, merged."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_model_status, get_peft_model

from hf_domino import DominoDraftModel, check_fit
from hf_domino.pair import load_pair

# Every linear layer but the correction head's, which is read weight by weight.
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
PROMPTS = [[5, 6, 7], [9, 9, 4], [7, 8, 3], [4, 5, 9]]


def draft(drafter):
    """Draft hidden states of a fixed block behind a fixed context."""
    shape = (1, 3, drafter.config.hidden_size)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(shape, generator=generator) for _ in drafter.config.target_layer_ids]
    positions = torch.arange(3)[None]
    with torch.no_grad():
        return drafter(torch.randn(shape, generator=generator), positions + 3, drafter.fuse_context(states), positions)


@pytest.fixture
def adapted(saved_pair):
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=LAYERS, init_lora_weights=False)
    return get_peft_model(DominoDraftModel.from_pretrained(saved_pair[1]), config).eval()


@pytest.fixture
def adapter(adapted, tmp_path):
    adapted.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_saved_and_loaded(adapted, adapter, saved_pair):
    assert not (adapter / "config.json").exists()
    alone = DominoDraftModel.from_pretrained(saved_pair[1])
    by_name = DominoDraftModel.from_pretrained(adapter)
    expected = draft(adapted.get_base_model())
    assert not torch.equal(expected, draft(alone))
    alone.load_adapter(str(adapter))
    for drafter in (by_name, alone):
        assert isinstance(drafter, DominoDraftModel)
        assert torch.equal(draft(drafter), expected)


@pytest.mark.parametrize("state", ["added", "merged", "off"])
def test_the_halves_of_an_adapted_projection_are_the_whole(make_drafter, tiny_qwen3, state):
    """An adapter counts once, wherever its part of the weight is."""
    config = LoraConfig(r=2, target_modules=["embed_proj.0"], init_lora_weights=False)
    adapted = get_peft_model(make_drafter(tiny_qwen3), config)
    if state == "merged":
        adapted.merge_adapter()
    elif state == "off":
        adapted.base_model.disable_adapter_layers()
    drafter, hidden, states = adapted.get_base_model(), torch.randn(3, 32), torch.randn(3, 16)
    head = drafter.head
    with torch.no_grad():
        halves = head.expand(head.activate(head.project_hidden(hidden), states))
        torch.testing.assert_close(halves, drafter.embed_proj(torch.cat((hidden, states), dim=1)), atol=1e-5, rtol=1e-5)


def test_checked(adapted, tiny_qwen3):
    def figures(drafter):
        return str(check_fit(drafter, tiny_qwen3, prompts=PROMPTS, max_new_tokens=8))

    assert figures(adapted) == figures(adapted.get_base_model())


def test_by_the_adapters_folder(adapter, saved_pair, adapted):
    """As commands take `--drafter`."""
    drafter = load_pair(saved_pair[0], adapter).drafter
    assert torch.equal(draft(drafter), draft(adapted.get_base_model()))
    assert get_model_status(drafter).active_adapters == ["default"]


def test_an_adapted_correction_head(saved_pair, tiny_qwen3, tmp_path):
    """It is read weight by weight, and so refused until it is merged, as the error says."""
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(DominoDraftModel.from_pretrained(saved_pair[1]), config).save_pretrained(tmp_path)
    prompt = torch.tensor(PROMPTS[:1])
    with pytest.raises(
        ValueError, match=r"without adapters, got \['embed_proj.0', 'embed_proj.2'\]. Merge the adapter"
    ):
        tiny_qwen3.generate(prompt, assistant_model=DominoDraftModel.from_pretrained(tmp_path), max_new_tokens=4)
    base = DominoDraftModel.from_pretrained(saved_pair[1])
    merged = PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    tiny_qwen3.generate(prompt, assistant_model=merged, max_new_tokens=4)
    assert merged.stats.num_new_tokens == 4

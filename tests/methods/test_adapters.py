"""PEFT's adapters on drafters: put in, saved, loaded by their folder, where they are merged, checked, refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from peft import AutoPeftModel, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import pipeline

from hf_domino import DominoDraftModel, attach, attached, check_fit
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
    alone.load_adapter(str(adapter))  # which leaves it beside the weights
    assert torch.equal(draft(alone), expected)
    assert isinstance(by_name, DominoDraftModel)
    torch.testing.assert_close(draft(by_name), expected, atol=1e-5, rtol=1e-5)


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
        halves = head.up(head.activate(head.project_hidden(hidden), states))
        torch.testing.assert_close(halves, drafter.embed_proj(torch.cat((hidden, states), dim=1)), atol=1e-5, rtol=1e-5)


def test_checked(adapted, tiny_qwen3):
    def figures(drafter):
        return str(check_fit(drafter, tiny_qwen3, prompts=PROMPTS, max_new_tokens=8))

    assert figures(adapted) == figures(adapted.get_base_model())


def test_by_the_adapters_folder(adapter, saved_pair, adapted, tiny_qwen3, target):
    """As commands take `--drafter`, `generate`, pipelines and a default drafter their assistant."""
    expected = draft(adapted.get_base_model())
    generator = pipeline("text-generation", model=str(saved_pair[0]), assistant_model=str(adapter))
    attach(target, adapter)
    found = [load_pair(saved_pair[0], adapter).drafter, generator.assistant_model, attached(target).drafter]
    for drafter in found:
        torch.testing.assert_close(draft(drafter), expected, atol=1e-5, rtol=1e-5)
    prompt = torch.tensor(PROMPTS[:1])
    written = tiny_qwen3.generate(prompt, assistant_model=str(adapter), max_new_tokens=8, do_sample=False)
    assert torch.equal(written, tiny_qwen3.generate(prompt, max_new_tokens=8, do_sample=False))


def test_by_pefts_auto_class(adapter, adapted):
    """Its files name a class of the drafter."""
    loaded = AutoPeftModel.from_pretrained(adapter, import_allowlist=["hf_domino"])
    assert torch.equal(draft(loaded.get_base_model()), draft(adapted.get_base_model()))


def test_by_an_adapters_name_without_network(saved_pair, adapter, adapted, tmp_path, monkeypatch):
    """It has no config.json on the Hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    commit = "0" * 40
    shutil.copytree(adapter, tmp_path / "models--user--adapter" / "snapshots" / commit)
    (tmp_path / "models--user--adapter" / "refs").mkdir()
    (tmp_path / "models--user--adapter" / "refs" / "main").write_text(commit)
    drafter = DominoDraftModel.from_pretrained("user/adapter", cache_dir=tmp_path)
    torch.testing.assert_close(draft(drafter), draft(adapted.get_base_model()), atol=1e-5, rtol=1e-5)


def test_an_adapted_correction_head(saved_pair, tiny_qwen3, tmp_path):
    """It is merged as it is loaded by its folder, and refused where it was put in by hand."""
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(DominoDraftModel.from_pretrained(saved_pair[1]), config)
    adapted.save_pretrained(tmp_path)
    prompt = torch.tensor(PROMPTS[:1])
    with pytest.raises(
        ValueError, match=r"without adapters, got \['embed_proj.0', 'embed_proj.2'\]. Merge the adapter"
    ):
        tiny_qwen3.generate(prompt, assistant_model=adapted.get_base_model(), max_new_tokens=4)
    drafter = DominoDraftModel.from_pretrained(tmp_path)
    merged = PeftModel.from_pretrained(DominoDraftModel.from_pretrained(saved_pair[1]), tmp_path).merge_and_unload()
    torch.testing.assert_close(drafter.state_dict(), merged.state_dict(), rtol=0, atol=0)
    tiny_qwen3.generate(prompt, assistant_model=drafter, max_new_tokens=4)
    assert drafter.stats.num_new_tokens == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_model_name_or_path": None}, r"must be the drafter's folder or Hub name, got None. Load the drafter"),
        ({"base_model_name_or_path": "./gone"}, r"must be a folder or a Hub name, got './gone'"),
        ({"base_model_name_or_path": "."}, r"must be the drafter's folder or Hub name, got '.'"),
        *(({"r": value}, "must be one that PEFT can merge") for value in (10**9, 0, "2", 1)),
        ({"target_modules": ["nope"]}, "must be one that PEFT can merge"),
        ({"target_modules": ["fc"]}, "must be of the tensors that .* got 'a file with layers.0.mlp.down_proj"),
        ({"target_modules": [*LAYERS, "embed_proj.0"]}, "must be of .* got 'a file without embed_proj.0.lora_A"),
        ({"peft_type": "PROMPT_TUNING"}, "must be one that PEFT can merge"),
    ],
)
def test_a_broken_configuration_of_an_adapter(adapter, fields, message, monkeypatch):
    monkeypatch.chdir(adapter)
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor[:, 1:], "must be one that PEFT can merge into its drafter, got 'RuntimeError"),
        (lambda tensor: tensor * float("nan"), r"fc.lora_B.weight must be finite"),
    ],
    ids=["shape", "nan"],
)
def test_a_broken_tensor_of_an_adapter(adapter, change, message):
    file, name = adapter / "adapter_model.safetensors", "base_model.model.fc.lora_B.weight"
    stored = load_file(file)
    save_file(stored | {name: change(stored[name]).contiguous()}, file)
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(adapter)

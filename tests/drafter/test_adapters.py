"""PEFT's adapters on drafters: put in, saved, loaded again by name, checked, merged."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_model_status, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import pipeline

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
        assert type(drafter) is DominoDraftModel
        assert torch.equal(draft(drafter), expected)


def test_merged(adapted, tmp_path):
    expected = draft(adapted.get_base_model())
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(draft(merged), expected, atol=1e-5, rtol=1e-5)  # sums in another order
    merged.save_pretrained(tmp_path)
    assert torch.equal(draft(DominoDraftModel.from_pretrained(tmp_path)), draft(merged))


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
    """As commands take `--drafter`, and pipelines an assistant."""
    drafter = load_pair(saved_pair[0], adapter).drafter
    assert torch.equal(draft(drafter), draft(adapted.get_base_model()))
    options = {"do_sample": False, "max_new_tokens": 8}
    plain = pipeline("text-generation", model=str(saved_pair[0]))("def f(a):", **options)
    generator = pipeline("text-generation", model=str(saved_pair[0]), assistant_model=str(adapter))
    assert generator("def f(a):", **options) == plain
    assert get_model_status(generator.assistant_model).active_adapters == ["default"]


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (None, r"base_model_name_or_path in adapter_config.json must be the drafter's folder .*drafter.load_adapter\("),
        (5, r"base_model_name_or_path in adapter_config.json must be the drafter's folder or Hub name, got 5"),
        ("./gone", r"base_model_name_or_path in adapter_config.json must be a folder or a Hub name, got './gone'"),
    ],
)
def test_an_adapter_of_a_drafter_that_is_not_there(adapter, base, message):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    with pytest.raises(ValueError, match=message):
        DominoDraftModel.from_pretrained(adapter)


def test_an_adapter_that_is_broken(adapter):
    file = adapter / "adapter_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": f"{adapter}/../{adapter.name}"})
    )
    with pytest.raises(ValueError, match=r"adapter_config.json must be the drafter's folder or Hub name, got"):
        DominoDraftModel.from_pretrained(adapter)
    for text in ("{", "[]"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"adapter_config.json must be a JSON (file|object), got"):
            DominoDraftModel.from_pretrained(adapter)


@pytest.mark.parametrize("lost", ["fc.lora_B.weight", "embed_proj.0.lora_A.weight"])
def test_an_adapter_without_a_tensor(saved_pair, tmp_path, lost):
    """What is missing would stay as it was made, whether the adapter is put in or merged."""
    modules = [*LAYERS, lost.split(".lora")[0]]
    config = LoraConfig(r=2, target_modules=modules, init_lora_weights=False)
    get_peft_model(DominoDraftModel.from_pretrained(saved_pair[1]), config).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "adapter_model.safetensors")
    del stored[f"base_model.model.{lost}"]
    save_file(stored, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=rf"must be of the tensors that its .* got 'a file without {lost}'"):
        DominoDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        *(({"r": value}, "must be one that PEFT can put") for value in (10**9, 0, "2", 1)),
        ({"rank_pattern": {"fc": 10**9}}, "must be one that PEFT can put"),
        *(({"target_modules": value}, "must be one that PEFT can put") for value in (["nope"], 3)),
        (
            {"target_modules": ["fc"]},
            "must be of the tensors that .* got 'a file with layers.0.mlp.down_proj",
        ),
        (
            {"target_modules": [*LAYERS, "embed_proj.0"]},
            "must be of .* got 'a file without embed_proj.0.lora_A",
        ),
        *(({"peft_type": value}, "must be one that PEFT can put") for value in ("NOPE", None, "PROMPT_TUNING")),
        ({"lora_alpha": "16"}, "must be one that PEFT can put"),
    ],
)
def test_a_value_of_its_configuration_that_cannot_be(adapter, fields, word):
    """Nothing is made in the sizes that it tells, and PEFT's own words stand behind the adapter's name."""
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ValueError, match=rf"the adapter {adapter} {word}"):
        DominoDraftModel.from_pretrained(adapter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: tensor[:, 1:], "must be one that PEFT can put into its drafter, got 'RuntimeError"),
        (lambda tensor: tensor * float("nan"), "'s fc.lora_B.weight must be finite"),
    ],
    ids=["shape", "nan"],
)
def test_a_tensor_of_an_adapter_that_cannot_be(adapter, change, message):
    file, name = adapter / "adapter_model.safetensors", "base_model.model.fc.lora_B.weight"
    stored = load_file(file)
    save_file(stored | {name: change(stored[name]).contiguous()}, file)
    with pytest.raises(ValueError, match=rf"the adapter {adapter} ?{message}"):
        DominoDraftModel.from_pretrained(adapter)


def test_an_adapted_correction_head(saved_pair, tiny_qwen3, tmp_path):
    """It is read weight by weight: merged as it is loaded by name, refused where it was put in by hand."""
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(DominoDraftModel.from_pretrained(saved_pair[1]), config)
    adapted.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"without adapters, got \['embed_proj.0', 'embed_proj.2'\]. Merge the adapter"
    ):
        tiny_qwen3.generate(torch.tensor(PROMPTS[:1]), assistant_model=adapted.get_base_model(), max_new_tokens=4)
    drafter = DominoDraftModel.from_pretrained(tmp_path)
    base = DominoDraftModel.from_pretrained(saved_pair[1])
    merged = PeftModel.from_pretrained(base, tmp_path).merge_and_unload()
    torch.testing.assert_close(drafter.state_dict(), merged.state_dict(), rtol=0, atol=0)
    tiny_qwen3.generate(torch.tensor(PROMPTS[:1]), assistant_model=drafter, max_new_tokens=4)
    assert drafter.stats.num_new_tokens == 4

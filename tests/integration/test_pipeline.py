"""The text-generation pipeline takes a drafter as an object and as a path, whatever lies beside it on disk."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from accelerate import disk_offload
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, pipeline

from hf_domino import DominoDraftModel

pytestmark = pytest.mark.transformers

TEXT = "def f(a):"
OPTIONS = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def expected(saved_pair):
    return pipeline("text-generation", model=str(saved_pair[0]))(TEXT, **OPTIONS)


def ask(target, assistant, **kwargs):
    generator = pipeline("text-generation", model=str(target), assistant_model=assistant, **kwargs)
    return generator, generator(TEXT, **OPTIONS)


def test_path(saved_pair, expected, monkeypatch):
    monkeypatch.chdir(saved_pair[1].parent)
    generator, answer = ask(saved_pair[0], saved_pair[1].name)
    assert answer == expected
    assert isinstance(generator.assistant_model, DominoDraftModel)
    assert generator.assistant_tokenizer is None
    assert generator.assistant_model.stats.num_new_tokens == 24


def test_object_with_adapters(saved_pair, expected):
    drafter = DominoDraftModel.from_pretrained(saved_pair[1])
    adapted = get_peft_model(drafter, LoraConfig(target_modules=["q_proj"]))
    generator, answer = ask(saved_pair[0], adapted)
    assert answer == expected
    assert generator.assistant_model is drafter
    assert adapted.stats.num_new_tokens == 24


def test_object_with_the_targets_tokenizer(saved_pair, expected, tiny_tokenizer):
    drafter = DominoDraftModel.from_pretrained(saved_pair[1])
    generator, answer = ask(saved_pair[0], drafter, assistant_tokenizer=tiny_tokenizer)
    assert answer == expected
    assert generator.assistant_model is drafter


@pytest.mark.parametrize("as_path", [True, False])
@pytest.mark.parametrize("change", [{"eos_token_id": [1]}, {"eos_token_id": 9, "bos_token_id": 4, "pad_token_id": 0}])
def test_other_special_tokens(saved_pair, expected, tmp_path, change, as_path):
    folder = shutil.copytree(saved_pair[1], tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert ask(saved_pair[0], str(folder) if as_path else DominoDraftModel.from_pretrained(folder))[1] == expected


def test_tokenizer_files_beside_the_drafter(saved_pair, expected, tiny_tokenizer, tmp_path):
    folder = shutil.copytree(saved_pair[1], tmp_path / "drafter")
    tiny_tokenizer.save_pretrained(folder)
    assert ask(saved_pair[0], str(folder))[1] == expected


def test_dtype_follows_the_target(saved_pair):
    generator, _ = ask(saved_pair[0], str(saved_pair[1]), dtype=torch.bfloat16)
    assert generator.assistant_model.dtype is torch.bfloat16


def test_several_prompts(saved_pair, expected):
    generator, _ = ask(saved_pair[0], str(saved_pair[1]))
    assert generator([TEXT, TEXT], **OPTIONS) == [expected, expected]
    texts = [TEXT, TEXT[:3]]
    generator.tokenizer.padding_side = "left"
    plain = pipeline("text-generation", model=str(saved_pair[0]), tokenizer=generator.tokenizer)
    assert generator(texts, batch_size=2, **OPTIONS) == plain(texts, batch_size=2, **OPTIONS)


def test_drafter_for_another_target(tiny_qwen3, saved_pair, make_drafter, tmp_path):
    make_drafter(tiny_qwen3, vocab_size=96).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"vocab_size must be 64 .the target's vocab_size., got 96"):
        pipeline("text-generation", model=str(saved_pair[0]), assistant_model=str(tmp_path))


def test_plain_assistant_by_path(saved_pair, tiny_tokenizer, tmp_path, expected):
    target = AutoModelForCausalLM.from_pretrained(saved_pair[0])
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "eos_token_id", "pad_token_id", "bos_token_id")
    fields = {name: getattr(target.config, name) for name in sizes}
    LlamaForCausalLM(LlamaConfig(**fields, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    generator, answer = ask(saved_pair[0], str(tmp_path))
    assert answer == expected
    assert isinstance(generator.assistant_model, LlamaForCausalLM)


def test_path_beside_an_offloaded_target(saved_pair, expected, tmp_path):
    """Its weights are nowhere between forwards: the drafter goes where the target computes."""
    target = AutoModelForCausalLM.from_pretrained(saved_pair[0])
    disk_offload(target, str(tmp_path), torch.device("cpu"))
    target.hf_device_map = {"": "cpu"}  # as `device_map` leaves it, by which a pipeline does not move the target
    generator = pipeline(
        "text-generation", model=target, tokenizer=str(saved_pair[0]), assistant_model=str(saved_pair[1])
    )
    assert target.device.type == "meta"
    assert generator(TEXT, **OPTIONS) == expected

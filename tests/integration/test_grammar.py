"""Structured output: a drafter writes plain text under a grammar, too, alone and in batches, and drafts keep to it."""

from __future__ import annotations

import json

import pytest
import torch

import hf_domino

xgrammar = pytest.importorskip("xgrammar")
from xgrammar.contrib.hf import LogitsProcessor  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["negative", "positive"]}, "name": {"type": "string", "maxLength": 8}},
    "required": ["kind", "name"],
}
PROMPTS = ["def classify(text):\n    return ", "DEFAULT = "]
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 50}


@pytest.fixture(scope="module")
def grammar(pair):
    """The schema, compiled for its tokenizer."""
    info = xgrammar.TokenizerInfo.from_huggingface(pair.tokenizer, vocab_size=pair.target.config.vocab_size)
    return xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(SCHEMA, any_whitespace=False)


@pytest.fixture
def generate(pair, grammar):
    """A function that generates with a seed: new tokens, by xgrammar's own processor or by ours."""

    def new_tokens(prompts, is_ours=False, **arguments) -> torch.Tensor:
        inputs = pair.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        start = inputs["input_ids"].shape[1]
        if is_ours:
            arguments["prefix_allowed_tokens_fn"] = hf_domino.AllowedByGrammar(grammar, start)
        else:
            arguments["logits_processor"] = [LogitsProcessor(grammar)]  # one can be used once
        torch.manual_seed(3)
        return pair.target.generate(**inputs, max_new_tokens=40, **arguments)[:, start:]

    return new_tokens


@pytest.mark.parametrize(("count", "sampling"), [(1, SAMPLED), (2, {"do_sample": False})], ids=["one", "two"])
def test_the_text_is_the_one_of_plain_generate(pair, generate, sampling, count):
    prompts, beside = PROMPTS[:count], sampling | {"assistant_model": pair.drafter}
    plain = generate(prompts, **sampling)
    for text in pair.tokenizer.batch_decode(plain, skip_special_tokens=True):
        assert set(json.loads(text)) == {"kind", "name"}
    assert torch.equal(generate(prompts, is_ours=True, **sampling), plain)
    assert torch.equal(generate(prompts, is_ours=True, prompt_lookup_num_tokens=6, **beside), plain)
    assert torch.equal(generate(prompts, is_ours=True, **beside), plain)
    if count == 1:
        length = pair.drafter.stats.tokens_per_forward
        assert torch.equal(generate(prompts, prompt_lookup_num_tokens=6, **beside), plain)
        assert torch.equal(generate(prompts, **beside), plain)
        assert length > pair.drafter.stats.tokens_per_forward  # drafts keep to the grammar


def test_a_batch_with_a_processor_that_keeps_state_is_refused(pair, generate):
    with pytest.raises(ValueError, match=r"keep no state, for a batch, got \['LogitsProcessor'\]"):
        generate(PROMPTS, assistant_model=pair.drafter)


def test_what_is_allowed_is_a_function_of_the_text(pair, grammar):
    prompt = torch.arange(5)
    texts = [
        torch.cat((prompt, torch.tensor(pair.tokenizer(text)["input_ids"], dtype=torch.long)[:length]))
        for text in ('{"kind": "negative", "name": "a b"}', '{"kind": "positive"', "def f(", '{"name": 1', "{}")
        for length in range(12)
    ]
    end = torch.tensor([pair.tokenizer.eos_token_id])
    texts += [torch.cat((text, end)) for text in texts]
    asked, allowed = hf_domino.AllowedByGrammar(grammar, len(prompt)), {}
    for index in torch.randperm(3 * len(texts)).tolist():  # as drafts come and go
        text, row = texts[index % len(texts)], index % 2
        expected = hf_domino.AllowedByGrammar(grammar, len(prompt))(0, text)
        assert torch.equal(asked(row, text), expected)
        allowed[index % len(texts)] = expected
    assert all(len(ids) for ids in allowed.values())
    assert torch.equal(allowed[len(texts) - 1], end)  # behind its end, as where it is broken, only the end follows


def test_a_prompt_of_negative_length_is_refused(grammar):
    with pytest.raises(ValueError, match=r"prompt_length must be .*, got -1"):
        hf_domino.AllowedByGrammar(grammar, -1)

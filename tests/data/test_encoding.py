"""Ids of given text: what a tokenizer adds stands there once, and the loss falls on blanks too."""

from __future__ import annotations

import copy

import pytest
from chats import chat_tokenizer, texts_of_row, write_lines
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_domino.data.encoding import encode_text
from hf_domino.data.rows import load_rows
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.pair import BUNDLED, find_target

pytestmark = pytest.mark.transformers

BOTH, ENDS = "<mask> $A <eos>", "$A <eos>"


@pytest.fixture
def adding(tiny_tokenizer):
    """A function that returns a tokenizer that adds tokens to a text: `<mask>` begins one, `<eos>` ends it."""

    def make(pattern):
        tokenizer = copy.deepcopy(tiny_tokenizer)
        special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<mask>", "<eos>")]
        template = processors.TemplateProcessing(single=pattern, special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = template
        return tokenizer

    return make


@pytest.mark.parametrize(
    ("record", "pattern", "read", "learned"),
    [
        ({"text": "abc"}, BOTH, "<mask>abc<eos>", "<mask>abc<eos>"),
        ({"text": "<mask>abc"}, BOTH, "<mask>abc<eos>", "<mask>abc<eos>"),
        ({"text": "<mask>abc<eos>"}, BOTH, "<mask>abc<eos>", "<mask>abc<eos>"),
        ({"prompt": "ab", "completion": "cd"}, BOTH, "<mask>abcd<eos>", "cd<eos>"),
        ({"prompt": "<mask>ab", "completion": "cd"}, BOTH, "<mask>abcd<eos>", "cd<eos>"),
        ({"prompt": "ab", "completion": "cd"}, ENDS, "abcd<eos>", "cd<eos>"),
        ({"prompt": "ab", "completion": "cd<eos>"}, ENDS, "abcd<eos>", "cd<eos>"),
        ({"prompt": "", "completion": "cd"}, BOTH, "<mask>cd<eos>", "cd<eos>"),
    ],
)
def test_a_text_begins_and_ends_once(record, pattern, read, learned, adding, tmp_path):
    tokenizer = adding(pattern)
    (row,) = load_rows(write_lines(tmp_path / "rows.jsonl", [record]), tokenizer)
    assert texts_of_row(row, tokenizer) == (read, learned)


@pytest.fixture(params=["always", "first"])
def sentencepiece(request):
    """A tokenizer that marks the beginning of every word, and of every text, by a space."""
    words = ["<unk>", "</s>", "▁", "2", "4", "+", "=", "\n", "▁2", "▁4"]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocabulary, [("▁", "2"), ("▁", "4")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=request.param)
    backend.decoder = decoders.Metaspace(prepend_scheme=request.param)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("prompt", ["2+2=", "2+2= ", "2+2=\n"])
@pytest.mark.parametrize("completion", ["4", " 4", "\n4", "+2"])
def test_a_completion_follows_its_prompt_without_a_space_between(prompt, completion, sentencepiece, tmp_path):
    record = {"prompt": prompt, "completion": completion}
    (row,) = load_rows(write_lines(tmp_path / "rows.jsonl", [record]), sentencepiece)
    assert texts_of_row(row, sentencepiece)[0] == f"{prompt}{completion}</s>"


def test_a_text_that_the_target_goes_on_with_has_no_end(adding):
    tokenizer = adding(BOTH)
    assert tokenizer.decode(encode_text("ab", tokenizer, goes_on=True)) == "<mask>ab"
    assert tokenizer.decode(encode_text("ab<eos>", tokenizer, goes_on=True)) == "<mask>ab<eos>"
    assert tokenizer.decode(encode(tokenizer, [{"text": "<mask>ab"}])["input_ids"][0]) == "<mask>ab"


BYTES = "{% for m in messages %}<|mask|>{{ m.role }}<|mask|>{{ m.content }}<|endoftext|>{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|mask|>assistant<|mask|>{% endif %}"
MARKED = BYTES.replace(
    "{{ m.content }}<|endoftext|>",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|endoftext|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|endoftext|>{% endif %}",
)


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("template", [BYTES + ASKS, MARKED + ASKS], ids=["by turns", "generation block"])
def test_indentation_is_learned(template, trim_offsets, tmp_path):
    tokenizer = chat_tokenizer(AutoTokenizer.from_pretrained(find_target(BUNDLED)), template)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    code = "    for x in y:\n        if x:\n            return  x\n  "
    messages = [{"role": "user", "content": "  code "}, {"role": "assistant", "content": code}]
    (row,) = load_rows(write_lines(tmp_path / "rows.jsonl", [{"messages": messages}]), tokenizer)
    assert texts_of_row(row, tokenizer)[1] == f"{code}<|endoftext|>"

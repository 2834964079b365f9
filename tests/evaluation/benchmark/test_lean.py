"""The lean loop writes what plain `generate` writes, greedily and with the same random numbers."""

from __future__ import annotations

import pytest
import torch
from builders import left_padded

from hf_domino.evaluation.benchmark.lean import lean_decoding

PROMPTS = [torch.tensor([5, 9, 30, 7]), torch.tensor([8, 4]), torch.tensor([11, 40, 21])]
LAWS = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "sample": {"do_sample": True, "temperature": 0.7, "top_k": 0},
}


def generate(target, inputs, law, **arguments):
    torch.manual_seed(0)
    return target.generate(**inputs, **LAWS[law], max_new_tokens=40, **arguments)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_plain(tiny_qwen3, law, batch_size):
    ids, mask = left_padded(PROMPTS[:batch_size], pad=2)
    inputs = {"input_ids": ids, "attention_mask": mask}
    plain = generate(tiny_qwen3, inputs, law)
    assert torch.equal(generate(tiny_qwen3, inputs, law, custom_generate=lean_decoding), plain)


@pytest.mark.parametrize("every", [1, 8])
def test_stops_at_the_last_end_of_text(tiny_qwen3, monkeypatch, every):
    """However seldom it looks: tokens behind the end are cut off."""
    monkeypatch.setattr("hf_domino.evaluation.benchmark.lean.checks_every", lambda device: every)
    ids, mask = left_padded(PROMPTS, pad=2)
    inputs = {"input_ids": ids, "attention_mask": mask}
    free = tiny_qwen3.generate(**inputs, do_sample=False, max_new_tokens=12, eos_token_id=None)[:, ids.shape[1] :]
    ends = {"eos_token_id": free[:, 4].unique().tolist(), "do_sample": False, "max_new_tokens": 40}
    plain = tiny_qwen3.generate(**inputs, **ends)
    assert plain.shape[1] <= ids.shape[1] + 5
    assert torch.equal(tiny_qwen3.generate(**inputs, **ends, custom_generate=lean_decoding), plain)

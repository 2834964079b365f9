"""The bundled pair on held-out prompts: greedy output equals plain generate, and the text is worth drafting."""

from __future__ import annotations

import hashlib
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_domino.data.filters import distinct_ngram_ratio
from hf_domino.evaluation.benchmark.divergences import find_divergences
from hf_domino.pair import BUNDLED, Pair, domino_folder, load_pair, read_prompts
from hf_domino.targets.identity import TargetIdentity, differences, identify

FOLDER = Path(__file__).parents[1] / "model_cards" / BUNDLED
MAX_FILE_BYTES, MAX_WEIGHTS_BYTES, MAX_OTHER_BYTES = 16 * 10**6, 10**8, 20 * 10**6
MIN_DISTINCT_4GRAM = 0.6  # below this the target loops, which flatters every method

pytestmark = pytest.mark.skipif(not domino_folder(FOLDER).exists(), reason="the bundled pair is not in this checkout")


def generate(pair: Pair, text: str, max_new_tokens: int, **arguments) -> torch.Tensor:
    """New tokens of a greedy generation."""
    inputs = pair.tokenizer(text, return_tensors="pt")
    output = pair.target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **arguments)
    return output[0, inputs["input_ids"].shape[1] :]


def check_prompts(pair: Pair, prompts: list[dict], max_new_tokens: int) -> list[float]:
    """Compare plain and assisted output on every prompt; returns the distinct-4-gram ratio of each."""
    different, ratios = [], []
    for index, prompt in enumerate(prompts):
        plain = generate(pair, prompt["text"], max_new_tokens)
        assisted = generate(pair, prompt["text"], max_new_tokens, assistant_model=pair.drafter)
        ratios.append(distinct_ngram_ratio(plain.tolist()))
        if not torch.equal(plain, assisted):
            different.append(index)
    assert different == []
    return ratios


def test_the_drafters_name_their_target(pair, baseline):
    for drafter in (pair.drafter, baseline):
        recorded = TargetIdentity.recorded_in(drafter.config)
        assert recorded.has_weights_of(identify(pair.target))
        assert differences(replace(recorded, dtype=None), identify(pair.target)) == {}


def test_greedy_is_lossless_on_some_prompts(pair):
    check_prompts(pair, read_prompts(FOLDER / "prompts.jsonl")[:2], max_new_tokens=32)
    assert pair.drafter.stats.acceptance_length > 1


@pytest.mark.slow
def test_greedy_is_lossless_on_all_prompts(pair):
    prompts = read_prompts(FOLDER / "prompts.jsonl")
    assert len(prompts) >= 50
    assert statistics.fmean(check_prompts(pair, prompts, max_new_tokens=128)) >= MIN_DISTINCT_4GRAM


def test_a_batch_is_lossless(pair):
    texts = [prompt["text"] for prompt in read_prompts(FOLDER / "prompts.jsonl")[3:6]]
    inputs = pair.tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    options = {"max_new_tokens": 32, "do_sample": False}
    plain = pair.target.generate(**inputs, **options)
    assert torch.equal(pair.target.generate(**inputs, assistant_model=pair.drafter, **options), plain)


@pytest.mark.slow
def test_bf16_differs_at_near_ties_only():
    """Forwards over a block and over one token round differently, so bf16 text may part where two tokens tie."""
    pair, options = load_pair(FOLDER, dtype=torch.bfloat16), {"max_new_tokens": 64, "do_sample": False}
    for prompt in read_prompts(FOLDER / "prompts.jsonl"):
        text = generate(pair, prompt["text"], 64, assistant_model=pair.drafter)
        inputs = pair.tokenizer(prompt["text"], return_tensors="pt")
        found = find_divergences(pair.target, inputs, text[None], 0, **options)
        assert all(at["margin"] <= at["tie"] for at in found)


def test_prompts_are_what_their_hashes_say():
    for prompt in read_prompts(FOLDER / "prompts.jsonl"):
        assert hashlib.sha256(prompt["text"].encode()).hexdigest() == prompt["sha256"]


def test_sizes():
    sizes = {file: file.stat().st_size for file in FOLDER.parent.rglob("*") if file.is_file()}
    weights = sum(size for file, size in sizes.items() if file.suffix == ".safetensors")
    assert max(sizes.values()) <= MAX_FILE_BYTES
    assert weights <= MAX_WEIGHTS_BYTES
    assert sum(sizes.values()) - weights <= MAX_OTHER_BYTES  # rows, text and figures

"""The bundled pair on held-out prompts, sampled: in fp64 every text is plain generate's, in fp32 up to near ties."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_domino.evaluation.benchmark.divergences import find_divergences
from hf_domino.pair import BUNDLED, Pair, domino_folder, load_pair, read_prompts

FOLDER = Path(__file__).parents[1] / "model_cards" / BUNDLED
LAWS = {
    "T 0.7": {"temperature": 0.7},
    "T 1.0": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "penalty": {"temperature": 1.0, "repetition_penalty": 1.3},
}
NEW_TOKENS = 128

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not domino_folder(FOLDER).exists(), reason="the bundled pair is not in this checkout"),
]


@pytest.fixture(scope="module")
def pair() -> Pair:
    """The bundled pair in fp64."""
    return load_pair(FOLDER, dtype=torch.float64)


def law_of(name: str) -> dict:
    return {"do_sample": True, "top_k": 0, "max_new_tokens": NEW_TOKENS} | LAWS[name]


def batches_of(pair: Pair, size: int, num_prompts: int) -> list:
    texts = [prompt["text"] for prompt in read_prompts(FOLDER / "prompts.jsonl")[:num_prompts]]
    pieces = [texts[first : first + size] for first in range(0, len(texts), size)]
    return [pair.tokenizer(piece, return_tensors="pt", padding=True, padding_side="left") for piece in pieces]


@pytest.mark.parametrize("distribution", LAWS)
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_same_seed_writes_the_same_text(pair, batch_size, distribution):
    """And leaves the generator where plain generate does."""
    for seed, inputs in enumerate(batches_of(pair, batch_size, num_prompts=50)):
        found = []
        for drafter in (None, pair.drafter):
            torch.manual_seed(seed)
            text = pair.target.generate(**inputs, **law_of(distribution), assistant_model=drafter)
            found.append((text.tolist(), torch.get_rng_state().tolist()))
        assert found[0] == found[1]
    assert pair.drafter.stats.acceptance_length > 1


@pytest.mark.parametrize("distribution", ["T 0.7", "T 1.0", "penalty"])  # others forbid what is at an edge
def test_fp32_differs_at_near_ties_only(distribution):
    """Forwards over a block and over one token round differently; each difference is as small as rounding is."""
    pair = load_pair(FOLDER)
    for seed, inputs in enumerate(batches_of(pair, 1, num_prompts=50)):
        torch.manual_seed(seed)
        text = pair.target.generate(**inputs, **law_of(distribution), assistant_model=pair.drafter)
        new = text[:, inputs["input_ids"].shape[1] :]
        assert all(
            at["margin"] <= at["tie"] for at in find_divergences(pair.target, inputs, new, seed, **law_of(distribution))
        )

"""Random calls of `generate`: prompts, budgets, ends, processors, seeds, drafters, memories. Never a mismatch."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from builders import left_padded
from families import build
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from method_table import EVERY, RECYCLING
from oracle import oracle

from hf_domino import LookupMemory
from hf_domino.configuration.from_target import eos_ids_of
from hf_domino.data.writers import cut_at_end

CASES, CASES_BY_HAND = 12, 2000
VOCAB, PAD, LONGEST = 64, 2, 96  # LONGEST: positions of the target

# Shrinking would take minutes: a failing call is printed whole and is short enough.
MANNER = {
    "deadline": None,
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
}
PROCESSORS = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 9},
    {"bad_words_ids": [[token, token + 1] for token in range(VOCAB - 1)] + [[7], [8]]},
    {"sequence_bias": [[[token, VOCAB - token], 3.0] for token in range(4, 9)] + [[[9], 1.0]]},
    {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    {"forced_eos_token_id": 5, "suppress_tokens": [*range(10, 20)], "begin_suppress_tokens": [5, 6, 7, 8]},
]
DRAFTERS = [
    {},
    {"block_size": 2},
    {"block_size": 9},
    *EVERY.values(),
    {"projector_type": RECYCLING},
    {"projector_type": RECYCLING, "draft_length": "adaptive"},
]
DRAFTERS += [{"draft_pool_size": None}, {"draft_length": "adaptive"}]


def merged(options: list[dict]) -> dict:
    return {name: value for some in options for name, value in some.items()}


CALLS = st.fixed_dictionaries(
    {
        "target": st.sampled_from(["qwen3", "llama", "mistral"]),
        "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=4),
        "budget": st.one_of(st.integers(1, 10), st.integers(1, 50)),
        "end_of_text": st.one_of(st.none(), st.integers(4, VOCAB - 1)),
        "accuracy": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "sampling": st.sampled_from([{}, {}, {"do_sample": True}, {"do_sample": True, "top_p": 0.9, "top_k": 0}]),
        "drafter": st.sampled_from(DRAFTERS),
        "processors": st.lists(st.sampled_from(PROCESSORS), max_size=3).map(merged),
        "to_the_limit": st.booleans(),
        "lookup": st.sampled_from([None, 1, 4, 10, 60]),
        "memory": st.sampled_from([None, 64, 5000]),  # how many tokens it holds
        "share_known": st.sampled_from([0.0, 0.5, 0.9, 1.0]),  # of the right texts, how many tokens are in the memory
        "seed": st.integers(0, 10_000),
    }
)


@pytest.fixture(scope="module")
def mistral():
    """A sliding-window target."""
    return build("mistral", vocab_size=VOCAB, sliding_window=7, max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def targets(tiny_qwen3, tiny_llama, mistral):
    return {"qwen3": tiny_qwen3, "llama": tiny_llama, "mistral": mistral}


def memory_of(call, texts, generator):
    """A memory of these texts, in which some tokens are others; None if the call has none."""
    if call["memory"] is None:
        return None
    memory = LookupMemory(call["memory"])
    for text in texts:
        others = torch.randint(VOCAB, (len(text),), generator=generator)
        is_known = torch.rand(len(text), generator=generator) < call["share_known"]
        memory.add(torch.where(is_known, torch.tensor(text), others))
    return memory


def check(call, targets, make_drafter):
    target, longest = targets[call["target"]], max(call["lengths"])
    generator = torch.Generator().manual_seed(call["seed"])
    rows = [torch.randint(4, VOCAB, (length,), generator=generator) for length in call["lengths"]]
    prompt = dict(zip(("input_ids", "attention_mask"), left_padded(rows, PAD), strict=True))
    budget = LONGEST - longest if call["to_the_limit"] else call["budget"]
    options = {"do_sample": False, "max_new_tokens": budget, "pad_token_id": PAD} | call["processors"]
    options |= call["sampling"]
    ends = {"eos_token_id": -1 if call["end_of_text"] is None else call["end_of_text"]}
    torch.manual_seed(call["seed"])
    plain = target.generate(**prompt, **options, **ends)
    left_at = torch.get_rng_state()
    drafter = make_drafter(target, **call["drafter"])
    drafter.memory = memory_of(call, [*plain.tolist(), *prompt["input_ids"].tolist()], generator)
    lookup = {"prompt_lookup_num_tokens": call["lookup"]}
    torch.manual_seed(call["seed"])
    with oracle(target, prompt["input_ids"], call["accuracy"], attention_mask=prompt["attention_mask"], **options):
        torch.manual_seed(call["seed"])
        assisted = target.generate(**prompt, assistant_model=drafter, **options, **ends, **lookup)
    assert torch.equal(assisted, plain)
    assert torch.equal(torch.get_rng_state(), left_at)
    texts = [cut_at_end(row, eos_ids_of(SimpleNamespace(**ends))).ids for row in assisted[:, longest:].tolist()]
    assert [1 + sum(rounds) for rounds in drafter.stats.rows] == [len(text) for text in texts]


@settings(max_examples=CASES, derandomize=True, **MANNER)
@given(call=CALLS)
def test_random_calls(call, targets, make_drafter):
    check(call, targets, make_drafter)


@pytest.mark.slow
@settings(max_examples=int(os.environ.get("HF_DOMINO_FUZZ_CASES", CASES_BY_HAND)), **MANNER)
@given(call=CALLS)
def test_many_random_calls(call, targets, make_drafter):
    check(call, targets, make_drafter)

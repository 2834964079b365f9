"""The target as a writer: rows that end leave the batch, and nobody else's words change."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from families import build
from test_hybrids import HYBRIDS

from hf_domino.configuration.from_target import eos_ids_of
from hf_domino.data.writers import DrawnToken, Sampling, TargetWriter, cut_at_end

pytestmark = pytest.mark.transformers

PROMPTS = [[4, 5, 6, 7], [8, 9], [10, 11, 12], [13, 14]]
ENDS = tuple(range(4, 24))  # a random target says one of them soon
# Others whose caches differ: none of attention, one of its own, and none that the model takes.
OTHER_CACHES = "mamba", "minimax", "openai-gpt"


@pytest.fixture
def steps(target):
    """Rows of every forward of the target."""
    rows = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_greedy_texts_are_those_of_each_prompt_alone_and_batches_shrink(chunk, target, steps):
    target.generation_config.eos_token_id = list(ENDS)
    options, greedy = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 2}, Sampling(24, 0.0)
    alone = [target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    steps.clear()
    whole = TargetWriter(target).write(PROMPTS, greedy, seed=0)
    assert [text.ids for text in whole] == alone
    assert len({len(text.ids) for text in whole}) > 1
    work = sum(steps)
    steps.clear()
    cpu_offload(target, torch.device("cpu"))  # an offloaded target writes the same
    assert TargetWriter(target, chunk).write(PROMPTS, greedy, seed=0) == whole
    assert sum(steps) < work if chunk < 24 else sum(steps) == work


def test_a_seed_stands_for_a_text_whatever_truncation_the_target_asks_for(target):
    writer, sampling = TargetWriter(target, chunk=4), Sampling(16, 1.0, ends=ENDS)
    state = torch.random.get_rng_state()
    first = writer.write(PROMPTS, sampling, seed=1)
    assert writer.write(PROMPTS, sampling, seed=1) == first != writer.write(PROMPTS, sampling, seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    target.generation_config.update(top_k=1, top_p=0.01, min_p=0.9)
    assert writer.write(PROMPTS, sampling, seed=1) == first
    greedy = writer.write(PROMPTS, Sampling(16, 0.0, ends=ENDS), seed=1)
    assert writer.write(PROMPTS, Sampling(16, 1.0, top_p=1e-9, ends=ENDS), seed=1) == greedy != first


@pytest.mark.parametrize(
    ("top_p", "expected"), [(1.0, [0.0, 0.5, 0.3, 0.2, 0.0]), (0.6, [0.0, 0.625, 0.375, 0.0, 0.0])]
)
def test_tokens_are_drawn_as_often_as_the_target_says(top_p, expected):
    torch.manual_seed(0)
    scores = torch.tensor([0.0, 0.5, 0.3, 0.2, 0.0]).log() * 0.7
    left = DrawnToken(0.7, top_p)(torch.zeros(20_000, 0, dtype=torch.int64), scores.expand(20_000, -1)).softmax(dim=-1)
    assert left.max(dim=-1).values.eq(1).all()
    torch.testing.assert_close(left.mean(dim=0), torch.tensor(expected), rtol=0, atol=0.02)
    assert left.mean(dim=0)[[0, 4]].eq(0).all()


def test_a_least_length_counts_from_the_start_of_a_text(target):
    target.generation_config.min_new_tokens = 5
    written = TargetWriter(target, chunk=4).write(PROMPTS, Sampling(16, 1.0, ends=ENDS), seed=0)
    assert 5 < min(len(text.ids) for text in written) < 16


@pytest.mark.parametrize("family", [*HYBRIDS, *OTHER_CACHES])
def test_texts_of_targets_with_recurrent_layers_stay_the_same_when_others_leave_the_batch(family):
    target = build(family)
    target.generation_config.update(eos_token_id=list(ENDS), pad_token_id=0)
    whole = TargetWriter(target).write(PROMPTS, Sampling(16, 0.0), seed=0)
    assert len({len(text.ids) for text in whole}) > 1
    for chunk in (1, 5):
        assert TargetWriter(target, chunk).write(PROMPTS, Sampling(16, 0.0), seed=0) == whole


@pytest.mark.parametrize(
    "options",
    [
        {"forced_eos_token_id": 0},
        {"guidance_scale": 1.5},
        {"cache_implementation": "static"},
        {"num_beams": 3, "num_return_sequences": 2},
    ],
)
def test_what_a_generation_configuration_asks_for_does_not_depend_on_the_chunk(options, target):
    target.generation_config.update(**options)
    sampling = Sampling(16, 0.0, ends=ENDS)
    whole = TargetWriter(target).write(PROMPTS, sampling, seed=0)
    assert len(whole) == len(PROMPTS)
    assert TargetWriter(target, chunk=4).write(PROMPTS, sampling, seed=0) == whole


def test_ends(target):
    assert cut_at_end([5, 1, 0, 0], (1, 2)).ids == [5, 1]
    assert not cut_at_end([5, 5], (1,)).ended
    assert eos_ids_of(target.generation_config) == ()
    target.generation_config.eos_token_id = 3
    assert eos_ids_of(target.generation_config) == (3,)
    target.generation_config.eos_token_id = [1, 2]
    assert eos_ids_of(target.generation_config) == (1, 2)

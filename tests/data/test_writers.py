"""The target as a writer: rows that end leave the batch, and nobody else's words change."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload

from hf_domino.data.writers import Sampling, TargetWriter, cut_at_end, ends_of

PROMPTS = [[4, 5, 6, 7], [8, 9], [10, 11, 12], [13, 14]]
ENDS = tuple(range(4, 24))  # a random target says one of them soon


@pytest.fixture
def steps(target, monkeypatch):
    """Rows of every forward of the target."""
    rows = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_greedy_texts_are_the_same_and_batches_shrink(chunk, target, steps):
    sampling = Sampling(24, 0.0, ends=ENDS)
    whole = TargetWriter(target).write(PROMPTS, sampling, seed=0)
    work = sum(steps)
    steps.clear()
    assert TargetWriter(target, chunk=chunk).write(PROMPTS, sampling, seed=0) == whole
    assert len({len(text.ids) for text in whole}) > 1
    assert sum(steps) < work if chunk < 24 else sum(steps) == work


def test_a_seed_stands_for_a_text(target):
    writer, sampling = TargetWriter(target, chunk=4), Sampling(16, 1.0, top_p=0.9, ends=ENDS)
    state = torch.random.get_rng_state()
    first = writer.write(PROMPTS, sampling, seed=1)
    assert writer.write(PROMPTS, sampling, seed=1) == first != writer.write(PROMPTS, sampling, seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_an_offloaded_target_writes_the_same(target):
    sampling = Sampling(8, 0.0, ends=ENDS)
    whole = TargetWriter(target).write(PROMPTS, sampling, seed=0)
    cpu_offload(target, torch.device("cpu"))
    assert TargetWriter(target).write(PROMPTS, sampling, seed=0) == whole


def test_what_counts_from_the_start_keeps_batches_whole(target):
    target.generation_config.min_new_tokens = 5
    assert TargetWriter(target, chunk=4).chunk is None
    written = TargetWriter(target, chunk=4).write(PROMPTS, Sampling(16, 1.0, ends=ENDS), seed=0)
    assert min(len(text.ids) for text in written) > 5


def test_ends(target):
    assert cut_at_end([5, 1, 0, 0], (1, 2)).ids == [5, 1]
    assert not cut_at_end([5, 5], (1,)).ended
    assert ends_of(target.generation_config) == ()
    target.generation_config.eos_token_id = [1, 2]
    assert ends_of(target.generation_config) == (1, 2)

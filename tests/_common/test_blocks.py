"""A `with` block that a generator or a task holds open is undone, whoever ends it, and in whatever order."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from builders import build_drafter
from families import build
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_domino
from hf_domino.decoding.recording import open_record, recorded_proposals
from hf_domino.integration.default_drafter import default_of
from hf_domino.stats.phases import PhaseTimer
from hf_domino.targets.attention import rowwise_attention

LAYER = nn.Linear(48, 32)
TARGET = build("qwen3")
# Each block, and what it changes.
BLOCKS = {
    "packed_linears": (lambda: hf_domino.packed_linears(LAYER), lambda: nn.Linear.forward),
    "rowwise_attention": (lambda: rowwise_attention(torch.device("cpu")), lambda: ALL_ATTENTION_FUNCTIONS["sdpa"]),
    "plain": (hf_domino.plain, lambda: default_of(TARGET)),
    "timed_phases": (hf_domino.timed_phases, lambda: PhaseTimer().enabled),
    "recorded_proposals": (recorded_proposals, open_record),
}


@pytest.fixture(params=BLOCKS)
def block(request, monkeypatch):
    monkeypatch.setenv("HF_DOMINO_PACKED", "1")
    hf_domino.attach(TARGET, build_drafter(TARGET))
    yield BLOCKS[request.param]
    hf_domino.detach(TARGET)


def held_open(enter):
    with enter():
        yield


def test_a_generator_that_another_thread_ends(block):
    enter, seen = block
    before = seen()
    generator = held_open(enter)
    next(generator)
    assert seen() != before
    with ThreadPoolExecutor(1) as pool:
        pool.submit(generator.close).result()
        assert pool.submit(seen).result() == before
    assert seen() == before


def test_generators_that_end_in_the_order_they_began(block):
    enter, seen = block
    before = seen()
    generators = [held_open(enter) for _ in range(3)]
    for generator in generators:
        next(generator)
    for generator in generators:
        assert seen() != before
        generator.close()
    assert seen() == before


def test_an_asynchronous_generator_that_another_task_ends(block):
    enter, seen = block
    before = seen()

    async def held():
        with enter():
            yield

    async def run():
        generator = held()
        await asyncio.create_task(anext(generator))
        await asyncio.create_task(generator.aclose())
        return seen()

    assert asyncio.run(run()) == before
    assert seen() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_keeps_its_own_blocks_and_no_others(block):
    enter, seen = block
    before = seen()
    opened = threading.Event()
    closed = threading.Event()

    def hold():
        with enter():
            opened.set()
            closed.wait(60)

    def is_undone_in_the_child():
        own = held_open(enter)
        next(own)
        child = os.fork()
        if not child:
            is_open = seen() != before
            own.close()
            os._exit(0 if is_open and seen() == before else 1)
        own.close()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    thread = threading.Thread(target=hold)
    thread.start()
    opened.wait(60)
    assert is_undone_in_the_child()
    closed.set()
    thread.join()
    assert seen() == before

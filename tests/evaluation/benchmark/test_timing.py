from __future__ import annotations

import pytest
import torch
from builders import build_drafter

from hf_domino.evaluation.benchmark.timing import PeakMemory, first_token_seconds, generate_timed, streamed_rounds

INPUTS = {"input_ids": torch.tensor([[5, 9, 33, 20, 7, 5, 9, 33]])}
CALL = {"do_sample": False, "max_new_tokens": 20}


@pytest.fixture
def count_forwards(tiny_qwen3):
    """Positions of each of the target's forwards."""
    lengths = []
    hook = tiny_qwen3.model.register_forward_hook(
        lambda module, args, kwargs, output: lengths.append(output.last_hidden_state.shape[1]), with_kwargs=True
    )
    yield lengths
    hook.remove()


@pytest.mark.parametrize("method", ["plain", "prompt_lookup", "domino"])
def test_generations_are_broken_off_after_the_first_token(tiny_qwen3, tiny_drafter, count_forwards, method):
    extra = {"plain": {}, "prompt_lookup": {"prompt_lookup_num_tokens": 3}, "domino": {"assistant_model": tiny_drafter}}
    assert first_token_seconds(tiny_qwen3, INPUTS, **extra[method], **CALL) > 0
    assert len(count_forwards) == 1


def test_rounds_are_those_behind_the_prompt(tiny_qwen3, count_forwards):
    call = CALL | {"prompt_lookup_num_tokens": 3}
    rounds = streamed_rounds(tiny_qwen3, INPUTS, **call)
    assert len(rounds) == len(count_forwards) - 1
    tokens, _ = generate_timed(tiny_qwen3, INPUTS, **call)
    assert 0 < tokens.shape[1] - sum(rounds) <= 4  # what came with the forward over the prompt


def test_no_memory_is_measured_on_a_cpu(tiny_qwen3):
    memory = PeakMemory([tiny_qwen3])
    memory.start()
    assert memory.read() is None


@pytest.mark.gpu
def test_memory_on_a_gpu_is_weights_and_what_is_added(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3).cuda()
    weights = sum(weight.nbytes for weight in drafter.parameters())
    memory = PeakMemory([drafter, drafter])
    memory.start()
    added = torch.empty(2**20, dtype=torch.uint8, device="cuda")
    del added
    assert memory.read() == weights + 2**20

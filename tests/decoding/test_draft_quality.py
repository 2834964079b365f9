"""Every proposal of every round is what the drafter says to that row's text alone: losses of acceptance are silent.

The text is the target's own whatever is drafted: only the proposals show that context, positions or state were wrong.
They are re-derived from the checkpoint's tensors by arithmetic that shares no code with the package.
"""

from __future__ import annotations

import itertools

import families
import pytest
import torch
from builders import build_drafter, left_padded
from oracle import at_most, oracle, proposed
from rederived import Rederived

PAD = 2
LENGTHS = [5, 13, 8, 1]
OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": -1}
ACCURACY = 0.7  # of the oracle: rows keep different numbers of proposals


def assert_rederived(rounds, drafter, target, paddings=(0,)):
    """Each row's proposals equal those for its text without padding; as many as there was room for."""
    rederived = Rederived(drafter, target)
    for row, ids, tokens in rounds:
        expected, _ = rederived.draft(torch.tensor(ids[paddings[row] :]))
        assert tokens == expected[: len(tokens)].tolist(), f"row {row}, {len(ids)} tokens"
    assert max(len(tokens) for _, _, tokens in rounds) == drafter.config.num_draft_tokens


@pytest.mark.parametrize("most", [(6,), (0, 6)], ids=["", "plain decode steps between"])
def test_padded_rows_of_a_batch(tiny_qwen3, most):
    """Rows drift apart, so that the context of the shorter ones has room behind it."""
    drafter = build_drafter(tiny_qwen3)
    ids, mask = left_padded([torch.randint(4, 64, (length,)) for length in LENGTHS], PAD)
    truth = oracle(tiny_qwen3, ids, ACCURACY, attention_mask=mask, **OPTIONS)
    with proposed() as rounds, truth, at_most(itertools.cycle(most)):
        tiny_qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, **OPTIONS)
    assert len({len(row) for row in drafter.stats.rows}) > 1
    assert_rederived(rounds, drafter, tiny_qwen3, [max(LENGTHS) - length for length in LENGTHS])


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("fields", [{}, {"draft_pool_size": None, "pure_draft_prefix_len": 2}], ids=["pool", "all"])
def test_rounds_of_one_sequence(tiny_llama, cache, shift_label, fields):
    drafter = build_drafter(tiny_llama, shift_label=shift_label, **fields)
    ids = torch.randint(4, 64, (1, 9))
    with proposed() as rounds, oracle(tiny_llama, ids, ACCURACY, **OPTIONS):
        tiny_llama.generate(ids, assistant_model=drafter, cache_implementation=cache, **OPTIONS)
    assert_rederived(rounds, drafter, tiny_llama)


def test_a_second_turn(tiny_qwen3):
    drafter = build_drafter(tiny_qwen3)
    ids = torch.randint(4, 64, (1, 9))
    with oracle(tiny_qwen3, ids, ACCURACY, **OPTIONS):
        first = tiny_qwen3.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **OPTIONS)
    ids = torch.cat((first.sequences, torch.randint(4, 64, (1, 6))), dim=1)
    with proposed() as rounds, oracle(tiny_qwen3, ids, ACCURACY, **OPTIONS):
        tiny_qwen3.generate(ids, past_key_values=first.past_key_values, assistant_model=drafter, **OPTIONS)
    assert_rederived(rounds, drafter, tiny_qwen3)


def test_after_recurrent_states_were_rewound():
    target = families.build("lfm2")
    drafter = build_drafter(target)
    ids = torch.randint(4, 90, (1, 9))
    with proposed() as rounds, oracle(target, ids, ACCURACY, **OPTIONS):
        target.generate(ids, assistant_model=drafter, **OPTIONS)
    assert min(drafter.stats.acceptance_lengths) < drafter.config.num_draft_tokens
    assert_rederived(rounds, drafter, target)

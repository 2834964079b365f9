"""Every proposal of every round is what the drafter says to that row's text alone: losses of acceptance are silent.

The text is the target's own whatever is drafted: only the proposals show that context, positions or state were wrong.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from builders import build_drafter, left_padded
from oracle import oracle
from rederived import Rederived
from test_hybrids import build as build_hybrid

from hf_domino.decoding import drafting

PAD = 2
LENGTHS = [5, 13, 8, 1]
OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": -1}
ACCURACY = 0.7  # of the oracle: rows keep different numbers of proposals


@pytest.fixture
def rounds(monkeypatch):
    """Row, its ids so far and its proposals, of every round of every row."""
    seen, propose = [], drafting.DraftSession.propose

    def record(self, prefixes, *args, **kwargs):
        proposals = propose(self, prefixes, *args, **kwargs)
        for index, (row, length) in enumerate(zip(prefixes.rows, prefixes.lengths, strict=True)):
            seen.append((row, prefixes.ids[index, :length].clone(), proposals[index].tolist()))
        return proposals

    monkeypatch.setattr(drafting.DraftSession, "propose", record)
    return seen


def assert_rederived(rounds, drafter, target, paddings=(0,)):
    """Each row's proposals equal those for its text without padding; as many as there was room for."""
    rederived = Rederived(drafter, target)
    for row, ids, proposed in rounds:
        tokens, _ = rederived.draft(ids[paddings[row] :])
        assert proposed == tokens[: len(proposed)].tolist(), f"row {row}, {len(ids)} tokens"
    assert max(len(proposed) for _, _, proposed in rounds) == drafter.config.num_draft_tokens


@pytest.mark.parametrize("period", [1, 2], ids=["", "single steps between"])
def test_padded_rows_of_a_batch(tiny_qwen3, rounds, monkeypatch, period):
    """Rows drift apart, so that the context of the shorter ones has room behind it."""
    drafter, record, calls = build_drafter(tiny_qwen3), drafting.DraftSession.propose, itertools.count(1)

    def now_and_then(self, prefixes, most, *args):
        return record(self, prefixes, 0 if next(calls) % period else most, *args)

    monkeypatch.setattr(drafting.DraftSession, "propose", now_and_then)
    ids, mask = left_padded([torch.randint(4, 64, (length,)) for length in LENGTHS], PAD)
    with oracle(tiny_qwen3, ids, ACCURACY, attention_mask=mask, **OPTIONS):
        tiny_qwen3.generate(ids, attention_mask=mask, assistant_model=drafter, **OPTIONS)
    assert len({len(row) for row in drafter.stats.rows}) > 1
    assert_rederived(rounds, drafter, tiny_qwen3, [max(LENGTHS) - length for length in LENGTHS])


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("shift_label", [True, False])
def test_rounds_of_one_sequence(tiny_llama, rounds, cache, shift_label):
    drafter = build_drafter(tiny_llama, shift_label=shift_label)
    ids = torch.randint(4, 64, (1, 9))
    with oracle(tiny_llama, ids, ACCURACY, **OPTIONS):
        tiny_llama.generate(ids, assistant_model=drafter, cache_implementation=cache, **OPTIONS)
    assert_rederived(rounds, drafter, tiny_llama)


def test_a_second_turn(tiny_qwen3, rounds):
    drafter = build_drafter(tiny_qwen3)
    ids = torch.randint(4, 64, (1, 9))
    with oracle(tiny_qwen3, ids, ACCURACY, **OPTIONS):
        first = tiny_qwen3.generate(ids, assistant_model=drafter, return_dict_in_generate=True, **OPTIONS)
    ids = torch.cat((first.sequences, torch.randint(4, 64, (1, 6))), dim=1)
    rounds.clear()
    with oracle(tiny_qwen3, ids, ACCURACY, **OPTIONS):
        tiny_qwen3.generate(ids, past_key_values=first.past_key_values, assistant_model=drafter, **OPTIONS)
    assert_rederived(rounds, drafter, tiny_qwen3)


def test_after_recurrent_states_were_rewound(rounds):
    target = build_hybrid("Lfm2")
    drafter = build_drafter(target)
    ids = torch.randint(4, 90, (1, 9))
    with oracle(target, ids, ACCURACY, **OPTIONS):
        target.generate(ids, assistant_model=drafter, **OPTIONS)
    assert min(drafter.stats.acceptance_lengths) < drafter.config.num_draft_tokens
    assert_rederived(rounds, drafter, target)

"""After every round a cache holds what plain generation keeps, rewound, realigned or both, and not a position more."""

from __future__ import annotations

import pytest
import torch
from builders import left_padded
from oracle import faults
from test_families import PROMPT, WINDOW, build
from transformers import DynamicCache

from hf_domino.decoding.runner import TargetRunner

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # fp32 sums in another order
OPTIONS = {"do_sample": False, "max_new_tokens": 30}


def assert_as_plain(cache, known, lengths):
    """That a cache holds so many positions of each of its rows, whose keys and values are those of other caches."""
    longest = max(lengths)
    for index, layer in enumerate(cache.layers):
        kept = min(longest, WINDOW - 1) if layer.is_sliding else longest
        assert layer.keys.shape[2] == layer.values.shape[2] == kept
        assert layer.get_seq_length() == longest
        for row, length in enumerate(lengths):
            count, plain = min(length, kept), known[row].layers[index]
            for mine, all_there_are in ((layer.keys, plain.keys), (layer.values, plain.values)):
                expected = all_there_are[0, :, length - count : length]
                torch.testing.assert_close(mine[row, :, kept - count :], expected, **TOLERANCE)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Mistral", "Gemma3"])
@pytest.mark.parametrize("lengths", [[20], [4], [5, 20, 9]], ids=["long", "short", "batch"])
def test_every_round_leaves_what_plain_generation_keeps(monkeypatch, make_drafter, family, lengths):
    target, commit, rows, num_rounds = build(family), TargetRunner.commit, list(range(len(lengths))), 0
    ids, mask = left_padded([PROMPT[0, :length] for length in lengths])
    options = OPTIONS | {"attention_mask": mask}
    plain, known = target.generate(ids, **options), []
    for text, length in zip(plain, lengths, strict=True):
        known.append(DynamicCache())  # without a configuration it keeps all positions
        target(text[None, len(ids[0]) - length :], past_key_values=known[-1])

    def checking(self, counts, num_checked, staying):
        nonlocal rows, num_rounds
        commit(self, counts, num_checked, staying)
        rows, num_rounds = [rows[index] for index in staying], num_rounds + 1
        if rows:
            assert_as_plain(self.cache, [known[row] for row in rows], self._lengths)

    monkeypatch.setattr(TargetRunner, "commit", checking)
    with faults(plain.tolist(), target.config.vocab_size):
        result = target.generate(ids, assistant_model=make_drafter(target), return_dict_in_generate=True, **options)
    assert num_rounds > 5
    if len(lengths) == 1:
        assert_as_plain(result.past_key_values, known, [result.sequences.shape[1] - 1])
        assert not any(getattr(layer, "record_past", False) for layer in result.past_key_values.layers)

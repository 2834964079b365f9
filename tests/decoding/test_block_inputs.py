"""The positions and masks of verification forwards: those of plain decode steps, in caches that grow and in slots."""

from __future__ import annotations

import pytest
import torch
from builders import left_padded
from oracle import oracle
from test_families import PROMPT, build

GREEDY = {"do_sample": False, "max_new_tokens": 14}
STATIC = {"cache_implementation": "static"}


def forwards_of(target, *arguments, **options):
    """The position ids and padding masks of all forwards of a call after its prefill."""
    target.generate(*arguments, **options)  # tries the target with a batch, if it was not yet
    seen = []

    def note(module, _, kwargs):
        seen.append((kwargs["position_ids"].clone(), kwargs.get("attention_mask")))

    hook = target.register_forward_pre_hook(note, with_kwargs=True)
    try:
        text = target.generate(*arguments, **options)
    finally:
        hook.remove()
    return text, seen[1:]


@pytest.mark.parametrize("storage", [{}, STATIC], ids=["growing", "slots"])
@pytest.mark.parametrize("prompts", [[PROMPT[0]], [PROMPT[0, :5], PROMPT[0], PROMPT[0, 3:12]]], ids=["one", "batch"])
def test_each_block_follows_its_sequence(make_drafter, prompts, storage):
    target = build("Qwen2")
    drafter = make_drafter(target)
    ids, mask = left_padded(prompts)
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    with oracle(target, ids, 0.7, plain):
        text, seen = forwards_of(target, ids, attention_mask=mask, assistant_model=drafter, **GREEDY, **storage)
    assert torch.equal(text, plain)
    ends = [len(prompt) for prompt in prompts]  # of each sequence, the position of its next anchor
    rows = list(range(len(prompts)))
    rounds = [list(lengths) for lengths in drafter.stats.rows]
    for number, (positions, _) in enumerate(seen):
        rows = [row for row in rows if number < len(rounds[row])]
        starts = torch.tensor([ends[row] for row in rows])[:, None]
        assert torch.equal(positions[: len(rows)], starts + torch.arange(positions.shape[1]))
        for row in rows:
            ends[row] += rounds[row][number]
    assert len(seen) == max(len(lengths) for lengths in rounds)


def test_padding_stays_hidden_as_a_batch_is_realigned(make_drafter):
    target = build("Qwen2")
    drafter = make_drafter(target)
    ids, mask = left_padded([PROMPT[0, :5], PROMPT[0], PROMPT[0, 3:12]])
    plain = target.generate(ids, attention_mask=mask, **GREEDY)
    with oracle(target, ids, 0.7, plain):
        _, seen = forwards_of(target, ids, attention_mask=mask, assistant_model=drafter, **GREEDY)
    for positions, padding in seen:
        # A sequence sees as many columns as it has positions, and its padding is on the left.
        assert torch.equal(padding.sum(dim=1), positions[:, -1] + 1)
        assert torch.equal(padding, padding.sort(dim=1).values)

"""A round that is opened is the round that `generate` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_domino import explain_round
from hf_domino.decoding.drafting import DraftSession
from hf_domino.pair import BUNDLED, load_pair, read_prompts

BUNDLED_FOLDER = Path(__file__).parents[2] / "model_cards" / BUNDLED
PROMPT = torch.tensor([[5, 9, 33, 20, 7, 41]])
ARGUMENTS = {"do_sample": False, "repetition_penalty": 1.3}


@pytest.fixture
def real_rounds(monkeypatch):
    """What the rounds of the calls to come propose: text so far and proposals of each."""
    rounds, propose = [], DraftSession.propose

    def noted(self, prefixes, *args, **kwargs):
        proposals = propose(self, prefixes, *args, **kwargs)
        rounds.append((prefixes.ids[:, : prefixes.lengths[0]].clone(), proposals[0]))
        return proposals

    monkeypatch.setattr(DraftSession, "propose", noted)
    return rounds


@pytest.mark.parametrize("fields", [{}, {"shift_label": False}, {"projector_type": "dflash"}], ids=str)
def test_it_is_the_round_that_generate_runs(tiny_qwen3, make_drafter, real_rounds, fields):
    drafter = make_drafter(tiny_qwen3, **fields)
    text = tiny_qwen3.generate(
        PROMPT, assistant_model=drafter, max_new_tokens=12, num_assistant_tokens=100, eos_token_id=-1, **ARGUMENTS
    )
    lengths = drafter.stats.acceptance_lengths
    assert len(lengths) == len(real_rounds) > 3
    for (before, proposals), length in zip(real_rounds, lengths, strict=True):
        opened = explain_round(drafter, tiny_qwen3, before, **ARGUMENTS)
        assert opened.anchor == before[0, -1]
        assert torch.equal(opened.proposals, proposals)
        assert opened.num_accepted + 1 == length
        start = before.shape[1]
        assert torch.equal(opened.committed[: text.shape[1] - start], text[0, start : start + length])


def test_proposals_are_chosen_from_the_corrected_law(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3, draft_pool_size=None, pure_draft_prefix_len=2)
    opened = explain_round(drafter, tiny_qwen3, PROMPT)
    assert torch.equal(opened.proposals, opened.corrected_probs.argmax(dim=-1))
    assert not torch.equal(opened.corrected_probs.argmax(dim=-1), opened.base_probs.argmax(dim=-1))
    assert torch.equal(opened.corrected_probs[:2], opened.base_probs[:2])
    torch.testing.assert_close(opened.target_probs.sum(dim=-1), torch.ones(drafter.config.num_draft_tokens + 1))


def test_without_the_head_base_and_corrected_are_one(tiny_qwen3, tiny_drafter):
    with_head = explain_round(tiny_drafter, tiny_qwen3, PROMPT)
    without = explain_round(tiny_drafter.view(projector_type="dflash"), tiny_qwen3, PROMPT)
    assert torch.equal(without.base_probs, without.corrected_probs)
    assert torch.equal(without.base_probs[0], with_head.base_probs[0])


@pytest.mark.parametrize("ids", [PROMPT[0], PROMPT[:, :1], PROMPT.expand(2, -1)], ids=lambda ids: str(list(ids.shape)))
def test_other_shapes_are_refused(tiny_qwen3, tiny_drafter, ids):
    with pytest.raises(ValueError, match=r"shape of input_ids must be \[1, T\] with T at least 2"):
        explain_round(tiny_drafter, tiny_qwen3, ids)


@pytest.mark.skipif(not BUNDLED_FOLDER.exists(), reason="the bundled pair is not in this checkout")
def test_rounds_of_the_bundled_pair_end_where_it_says():
    """Where drafts are accepted: the whole text, told by opening one round after another."""
    pair = load_pair(BUNDLED_FOLDER)
    drafter = pair.drafter.view(draft_length="full")
    prompt = pair.tokenizer(read_prompts(BUNDLED_FOLDER / "prompts.jsonl")[5]["text"], return_tensors="pt")["input_ids"]
    text = pair.target.generate(prompt, assistant_model=drafter, max_new_tokens=33, do_sample=False)
    told = text[:, : prompt.shape[1] + 1]
    lengths = []
    while told.shape[1] < text.shape[1]:
        opened = explain_round(drafter, pair.target, told)
        lengths.append(opened.num_accepted + 1)
        told = torch.cat((told, opened.committed[None]), dim=1)
    assert lengths == drafter.stats.acceptance_lengths
    assert max(lengths) > 2
    assert torch.equal(told[:, : text.shape[1]], text)

"""The drafter's context travels with the target's cache: a second turn drafts what a fresh prefill would."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import oracle

from hf_domino.decoding import drafting

OPTIONS = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": -1}
PROMPT = torch.arange(5, 17)[None]
MORE = torch.arange(30, 37)[None]


@pytest.fixture
def proposals(monkeypatch):
    """All tokens proposed, in order."""
    seen, propose = [], drafting.DraftSession.propose

    def record(self, *args, **kwargs):
        proposal = propose(self, *args, **kwargs)
        seen.append(proposal.tokens[0].tolist())
        return proposal

    monkeypatch.setattr(drafting.DraftSession, "propose", record)
    return seen


def first_turn(target, drafter, **options):
    arguments = OPTIONS | {"return_dict_in_generate": True} | options
    with oracle(target, PROMPT, 0.7, **OPTIONS):
        return target.generate(PROMPT, assistant_model=drafter, **arguments)


def second_turn(target, drafter, proposals, ids, cache):
    """Text and proposals of a turn on a cache, and of the same turn from nothing."""
    results = []
    for past in ({"past_key_values": cache}, {}):
        proposals.clear()
        text = target.generate(ids, assistant_model=drafter, **past, **OPTIONS)
        results.append((text.tolist(), list(proposals)))
    return results


def test_a_second_turn_drafts_at_once(tiny_qwen3, tiny_drafter, proposals):
    first = first_turn(tiny_qwen3, tiny_drafter)
    ids = torch.cat((first.sequences, MORE), dim=1)
    resumed, fresh = second_turn(tiny_qwen3, tiny_drafter, proposals, ids, first.past_key_values)
    assert resumed == fresh
    assert len(fresh[1]) > 5


def test_five_turns(tiny_qwen3, tiny_drafter, proposals):
    first = first_turn(tiny_qwen3, tiny_drafter)
    ids, cache = first.sequences, first.past_key_values
    for _ in range(4):
        ids = torch.cat((ids, MORE), dim=1)
        resumed, fresh = second_turn(tiny_qwen3, tiny_drafter, proposals, ids, cache)
        assert resumed == fresh
        ids = torch.tensor(resumed[0])


def test_a_cropped_cache(tiny_qwen3, tiny_drafter, proposals):
    """The last answer is taken back and asked for again."""
    first = first_turn(tiny_qwen3, tiny_drafter)
    cache = first.past_key_values
    cache.crop(-15)
    ids = torch.cat((first.sequences[:, : cache.get_seq_length()], MORE), dim=1)
    resumed, fresh = second_turn(tiny_qwen3, tiny_drafter, proposals, ids, cache)
    assert resumed == fresh


def test_a_copied_cache_serves_several_continuations(tiny_qwen3, tiny_drafter, proposals):
    first = first_turn(tiny_qwen3, tiny_drafter)
    for more in (MORE, MORE + 9):
        ids = torch.cat((first.sequences, more), dim=1)
        resumed, fresh = second_turn(tiny_qwen3, tiny_drafter, proposals, ids, copy.deepcopy(first.past_key_values))
        assert resumed == fresh


@pytest.mark.parametrize("how", ["plain turn between", "rewritten", "another drafter", "filled without"])
def test_an_unseen_prefix_costs_no_exactness(tiny_qwen3, tiny_drafter, make_drafter, proposals, how):
    drafter = None if how == "filled without" else tiny_drafter
    first = first_turn(tiny_qwen3, drafter)
    ids, cache = torch.cat((first.sequences, MORE), dim=1), first.past_key_values
    if how == "rewritten":
        cache.crop(-20)
        ids = torch.cat((first.sequences[:, : cache.get_seq_length()], MORE + 5), dim=1)
    if how in ("plain turn between", "rewritten"):
        ids = tiny_qwen3.generate(ids, past_key_values=cache, **OPTIONS)
        ids = torch.cat((ids, MORE), dim=1)
    drafter = make_drafter(tiny_qwen3, block_size=4) if how == "another drafter" else tiny_drafter
    resumed, fresh = second_turn(tiny_qwen3, drafter, proposals, ids, cache)
    assert resumed[0] == fresh[0]
    assert resumed[1] != fresh[1]


def test_saved_caches_do_not_hold_the_drafter(tiny_qwen3, tiny_drafter, tmp_path):
    cache = first_turn(tiny_qwen3, tiny_drafter).past_key_values
    torch.save(cache, tmp_path / "cache.pt")
    loaded = torch.load(tmp_path / "cache.pt", weights_only=False)
    assert loaded.get_seq_length() == cache.get_seq_length()
    assert loaded._hf_domino_context is None

"""Transformers' own DFlash loop with our twin: the target's text, and the drafts of our own loop."""

from __future__ import annotations

import pytest
import torch
from transformers import generation

from hf_domino.decoding.drafting import DraftSession
from hf_domino.evaluation.benchmark.native_dflash import NativeDFlash, has_native_dflash
from hf_domino.evaluation.benchmark.timing import streamed_rounds
from hf_domino.pair import BUNDLED, domino_folder, find_pair, load_pair, read_prompts

pytestmark = pytest.mark.skipif(not has_native_dflash(), reason="this transformers has no DFlash loop")

PROMPT = torch.tensor([[5, 9, 33, 20, 7]])
CALL = {"do_sample": False, "max_new_tokens": 24}


@pytest.fixture
def native_drafts(monkeypatch):
    """What Transformers' loop drafts, round by round."""
    rounds = []
    original = generation.DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self, input_ids, **kwargs):
        candidates, logits = original(self, input_ids, **kwargs)
        if logits is not None:
            rounds.append(candidates[0, input_ids.shape[1] :].tolist())
        return candidates, logits

    monkeypatch.setattr(generation.DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
    return rounds


@pytest.fixture
def our_drafts(monkeypatch):
    """What our loop drafts, round by round."""
    rounds = []
    original = DraftSession.propose

    def propose(self, *args, **kwargs):
        proposals = original(self, *args, **kwargs)
        rounds.append(proposals[0].tolist())
        return proposals

    monkeypatch.setattr(DraftSession, "propose", propose)
    return rounds


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("penalty", [None, 1.3])
def test_same_text_and_same_drafts(tiny_qwen3, make_drafter, native_drafts, our_drafts, shift_label, penalty):
    twin = make_drafter(tiny_qwen3, projector_type="dflash", shift_label=shift_label)
    call = CALL | {"repetition_penalty": penalty}
    plain = tiny_qwen3.generate(PROMPT, **call)
    ours = tiny_qwen3.generate(PROMPT, assistant_model=twin, **call)
    native = tiny_qwen3.generate(PROMPT, assistant_model=NativeDFlash(twin), speculation_type="dflash", **call)
    assert torch.equal(ours, plain)
    assert torch.equal(native, plain)
    assert len(native_drafts[0]) == twin.config.num_draft_tokens
    assert native_drafts == our_drafts[: len(native_drafts)]


def test_every_call_starts_from_its_own_context(tiny_qwen3, make_drafter):
    native = NativeDFlash(make_drafter(tiny_qwen3, projector_type="dflash"))
    call = CALL | {"assistant_model": native, "speculation_type": "dflash"}
    first = tiny_qwen3.generate(PROMPT, **call)
    tiny_qwen3.generate(PROMPT.flip(1), **call)
    assert torch.equal(tiny_qwen3.generate(PROMPT, **call), first)


def _has_bundled_pair() -> bool:
    try:
        return domino_folder(find_pair()).name == f"{BUNDLED}-domino"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _has_bundled_pair(), reason="the bundled pair is not in this checkout")
def test_accepts_what_our_loop_accepts():
    pair = load_pair()
    inputs = pair.tokenizer(read_prompts(pair.folder / "prompts.jsonl")[5]["text"], return_tensors="pt")
    twin = pair.twin.view(draft_length="full")
    pair.target.generate(**inputs, assistant_model=twin, **CALL)
    ours = twin.stats.rows[0]
    native = streamed_rounds(
        pair.target, inputs, assistant_model=NativeDFlash(pair.twin), speculation_type="dflash", **CALL
    )
    assert native == ours
    assert sum(native) > 1.3 * len(native)

"""Drafts of one session against an independent re-derivation."""

import pytest
import torch
from builders import build_drafter
from rederived import Rederived
from transformers import LogitsProcessorList

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.target.view import TargetModel

TOLERANCE = 1e-5  # fp32 sums of a few dozen terms, in another order


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("pure_draft_prefix_len", [0, 2])
@pytest.mark.parametrize("draft_pool_size", [None, 12])
@pytest.mark.parametrize("target_name", ["tiny_qwen3", "tiny_llama"])
def test_drafts_equal_an_independent_rederivation(
    request, target_name, draft_pool_size, shift_label, pure_draft_prefix_len
):
    target = request.getfixturevalue(target_name)
    conventions = {"shift_label": shift_label, "pure_draft_prefix_len": pure_draft_prefix_len}
    drafter = build_drafter(target, **conventions, draft_pool_size=draft_pool_size)
    view, seen = TargetModel(target, drafter.config), {}
    session = DraftSession(drafter, view, TokenLaw(LogitsProcessorList()))
    rederived = Rederived(drafter, target)

    def goes_on(index, scores, candidates):
        seen[index] = scores[0]
        return True

    ids = torch.randint(4, 64, (21,))
    with torch.no_grad():
        for stop in (9, 10, 14, 20):  # context arrives in pieces, as it does in rounds
            num_seen = sum(session._cache.lengths) + sum(session._new_counts if session._captured else [])
            captured = view.captured(target(ids[None, :stop], **view.capture_kwargs()))
            session.observe(tuple(states[:, num_seen:] for states in captured), stop)
            seen.clear()
            proposals = session.propose(Prefixes.of(ids[None, : stop + 1]), goes_on=goes_on)
            tokens, logits = rederived.draft(ids[: stop + 1])
            scores = torch.stack([seen[index] for index in range(drafter.config.num_draft_tokens)])
            if draft_pool_size:  # in an order of its own
                scores, logits = (values.sort(descending=True).values for values in (scores, logits))
            torch.testing.assert_close(scores, logits[:, : scores.shape[1]], atol=TOLERANCE, rtol=TOLERANCE)
            assert proposals[0].tolist() == tokens.tolist()
            assert proposals.shape[1] == drafter.config.num_draft_tokens

"""The head along a server's blocks proposes what our rollout does."""

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.serving.head import BlockHead, anchors_of
from hf_domino.target.view import TargetModel

NUM_REQUESTS = 3


def head_of(drafter):
    head = BlockHead(drafter.config)
    head.load_state_dict(
        {n: t for n, t in drafter.state_dict().items() if n.split(".")[0] in ("prefix_gru", "embed_proj")}
    )
    return head


@torch.no_grad()
@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("prefix_len", [0, 1, 3])
@pytest.mark.parametrize("num_proposals", [1, 4, 7])
def test_it_proposes_what_the_rollout_does(tiny_qwen3, shift_label, prefix_len, num_proposals):
    shape = {"block_size": 8, "shift_label": shift_label, "pure_draft_prefix_len": prefix_len}
    drafter = build_drafter(tiny_qwen3, draft_pool_size=None, **shape)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    target = TargetModel(tiny_qwen3, drafter.config)
    hidden = 0.3 * torch.randn(NUM_REQUESTS, num_proposals, drafter.config.hidden_size)
    ids = torch.randint(4, VOCAB_SIZE, (NUM_REQUESTS, 5))
    prefixes = Prefixes(ids, [5] * NUM_REQUESTS, list(range(NUM_REQUESTS)))
    proposals = rollout(drafter, target, hidden, prefixes, TokenLaw([]))
    logits = head_of(drafter)(target.model.lm_head(hidden), hidden, ids[:, -1], target.embed)
    assert torch.equal(logits.argmax(dim=-1), proposals)
    base = target.model.lm_head(hidden).argmax(dim=-1)
    assert torch.equal(proposals[:, :prefix_len], base[:, :prefix_len])
    if num_proposals > prefix_len:
        assert not torch.equal(proposals, base)


def test_the_anchors_of_padded_rows():
    rows = torch.tensor([7, 1, 1, 1, 9, 1, 1, 1, 5, 1, 1, 1, 0, 0, 0])
    assert anchors_of(rows, count=9, num_proposals=3).tolist() == [7, 9, 5]
    assert anchors_of(rows, count=3, num_proposals=3).tolist() == [7]

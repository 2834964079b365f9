"""Blocks that end early keep the law: what was told of a guess that missed is taken back."""

from types import SimpleNamespace

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter
from scipy.stats import chisquare
from transformers import LogitsProcessorList

from hf_domino.decoding import rollout as rollout_module
from hf_domino.decoding.pacing.estimates import LEAST_COST, Acceptance, RoundCost
from hf_domino.decoding.pacing.pacer import ConfidentBlock
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.rollout import rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.verification import verify
from hf_domino.target import TargetModel

NEVER = -30.0
ANY, EITHER, FIRST = torch.zeros(4), torch.tensor([0.0, 0, NEVER, NEVER]), torch.tensor([0.0, -9, NEVER, NEVER])
MIN_P_VALUE = 1e-4


def law_of(index, last):
    """Logits of a made-up text: proposal 3 is certain after token 1 and open after token 0."""
    return ANY if index == 0 else FIRST if index == 3 and last == 1 else EITHER


class TableHead:
    """A correction head that is a table."""

    def __init__(self, drafter, target, draft_hidden, anchors, candidates=None, table=None):
        self.candidates, self.tokens = candidates, [int(anchors[0])]

    def read(self, token_ids):
        self.tokens.append(int(token_ids[0]))

    def forget(self, num_proposals):
        del self.tokens[num_proposals + 1 :]

    def apply(self, index, base_logits):
        return law_of(index, self.tokens[index])[self.candidates[:, index]]

    def apply_to_all(self, base_logits):
        return torch.stack([law_of(index, self.tokens[index]) for index in range(base_logits.shape[1])])[None]


@torch.no_grad()
def test_where_the_pool_misses_the_law_is_kept(monkeypatch):
    """Drafts come from the target's own law, so whatever is committed third must be either of two, equally often."""
    monkeypatch.setattr(rollout_module, "EXACT_POOL_SIZE", 2)
    monkeypatch.setattr(rollout_module, "Corrections", TableHead)
    drafter = SimpleNamespace(has_correction_head=True, config=SimpleNamespace(draft_pool_size=None))
    base_logits = torch.tensor([1.0, 0.9, 0.0, 0.0]).expand(1, 5, 4).clone()
    target, law = SimpleNamespace(logits=lambda hidden: hidden), TokenLaw(LogitsProcessorList(), do_sample=True)
    counts = [0, 0]
    for _ in range(2000):
        block = ConfidentBlock(Acceptance(), price=0.035, num_rows=1)
        prefixes = Prefixes.of(torch.tensor([[0]]))
        proposal = rollout(drafter, target, base_logits, prefixes, law, goes_on=block.goes_on)
        assert block.length == proposal.tokens.shape[1]
        tokens = [0, *proposal.tokens[0].tolist()]
        scores = torch.stack([law_of(index, last) for index, last in enumerate(tokens)])[None]
        outcome = verify(proposal, scores, do_sample=True)
        committed = [*tokens[1 : int(outcome.num_accepted) + 1], int(outcome.bonus)]
        while len(committed) < 3:
            committed.append(int(law.choose(law_of(len(committed), committed[-1]))))
        counts[committed[2]] += 1
    assert chisquare(counts).pvalue > MIN_P_VALUE, counts


@torch.no_grad()
@pytest.mark.parametrize("draft_pool_size", [None, 3])
@pytest.mark.parametrize("do_sample", [True, False])
def test_a_block_knows_the_proposals_that_were_made(monkeypatch, tiny_qwen3, draft_pool_size, do_sample):
    drafter = build_drafter(tiny_qwen3, draft_pool_size=draft_pool_size, block_size=9)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    monkeypatch.setattr(rollout_module, "EXACT_POOL_SIZE", 3)
    target, law = TargetModel(tiny_qwen3, drafter.config), TokenLaw(LogitsProcessorList(), do_sample)
    lengths = set()
    for _ in range(30):
        hidden, prefixes = torch.randn(2, 9, 32), Prefixes.of(torch.randint(4, VOCAB_SIZE, (2, 5)))
        block = ConfidentBlock(Acceptance(), price=0.2, num_rows=2)
        proposal = rollout(drafter, target, hidden, prefixes, law, goes_on=block.goes_on)
        assert block.length == proposal.tokens.shape[1]
        assert [len(kinds) for kinds in block.kinds()] == [block.length] * 2
        lengths.add(block.length)
    assert len(lengths) > 2


def test_a_clock_that_stands_still():
    cost = RoundCost()
    for num_proposed in (8, 0, 8, 0):
        cost.observe(num_proposed, 0.0)
    assert cost.num_pairs == 2
    assert LEAST_COST <= cost.least <= cost.typical <= cost.nominal
    assert 0 <= cost.slope < 1

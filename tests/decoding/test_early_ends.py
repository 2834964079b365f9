"""Blocks that end early keep the text or the law, and know their proposals: a guess that missed is taken back."""

from types import SimpleNamespace

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter
from scipy.stats import chisquare
from transformers import LogitsProcessorList

from hf_domino.decoding import rollout as rollout_module
from hf_domino.decoding.noise.steps import OwnNoise
from hf_domino.decoding.pacing.blocks import ConfidentBlock
from hf_domino.decoding.pacing.estimates import LEAST_COST, Acceptance, RoundCost
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual.rule import ResidualRule
from hf_domino.decoding.rollout import rollout
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.verification import CoupledRule
from hf_domino.drafter.vocabulary import DraftVocabulary
from hf_domino.target.view import TargetModel

NEVER = -30.0
ANY, EITHER, FIRST = torch.zeros(4), torch.tensor([0.0, 0, NEVER, NEVER]), torch.tensor([0.0, -9, NEVER, NEVER])
MIN_P_VALUE = 1e-4
NUM_TOKENS, NUM_TEXTS = 6, 100
LAW = TokenLaw(LogitsProcessorList())


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
        law = law_of(index, self.tokens[index])
        return law[None] if self.candidates is None else law[self.candidates[:, index]]

    def apply_to_all(self, base_logits):
        return torch.stack([law_of(index, self.tokens[index]) for index in range(base_logits.shape[1])])[None]


@pytest.fixture
def small_pools(monkeypatch):
    """Guesses among two tokens of four, corrected by the table."""
    monkeypatch.setattr(rollout_module, "EXACT_POOL_SIZE", 2)
    monkeypatch.setattr(rollout_module, "Corrections", TableHead)


def run_round(rule, goes_on):
    """One round behind the text `[0]`, by drafts of the target's own law: what is proposed and what is committed."""
    config, kind = SimpleNamespace(draft_pool_size=None), SimpleNamespace(logits=lambda target, hidden: hidden)
    drafter = SimpleNamespace(has_correction_head=True, config=config, vocabulary=DraftVocabulary(), kind=kind)
    base_logits = torch.tensor([1.0, 0.9, 0.0, 0.0]).expand(1, 5, 4).clone()
    prefixes = Prefixes.of(torch.tensor([[0]]))
    rule.begin(prefixes, 4)
    rule.begin_round(prefixes, 5)
    goes_on = rule.listener(goes_on)
    proposals = rollout(drafter, None, base_logits, prefixes, LAW, rule.draft_noise, goes_on=goes_on)
    tokens = [0, *proposals[0].tolist()]
    logits = torch.stack([law_of(index, last) for index, last in enumerate(tokens)])[None]
    count, *tokens = rule.judge(prefixes, Tree(proposals), logits).outcome[0].tolist()
    return proposals.shape[1], tokens[:count]


@torch.no_grad()
@pytest.mark.usefixtures("small_pools")
def test_under_the_residual_rule_no_block_changes_the_law():
    """Drafts come from the target's own law, so whatever is committed third must be either of two, equally often."""
    rule, counts = ResidualRule(LAW, draws_drafts=True), [0, 0]
    for _ in range(2000):
        block = ConfidentBlock(Acceptance.by_confidence(), price=0.035, num_rows=1)
        num_proposed, committed = run_round(rule, block.goes_on)
        assert block.length == num_proposed
        while len(committed) < 3:
            committed.append(int(law_of(len(committed), committed[-1]).softmax(0).multinomial(1)))
        counts[committed[2]] += 1
    assert chisquare(counts).pvalue > MIN_P_VALUE, counts


@torch.no_grad()
@pytest.mark.usefixtures("small_pools")
def test_under_the_coupled_rule_no_block_changes_the_text():
    """The pool misses what is corrected, so that guesses are taken back."""
    lengths = set()
    for seed in range(NUM_TEXTS):
        torch.manual_seed(seed)
        plain = [0]
        while len(plain) <= NUM_TOKENS:
            plain.append(int(law_of(len(plain) - 1, plain[-1]).softmax(0).multinomial(1)))
        for price in (None, 0.035, 0.5):
            torch.manual_seed(seed)
            rule = CoupledRule(LAW, do_sample=True)
            block = ConfidentBlock(Acceptance.by_confidence(), price or 0.0, num_rows=1)
            num_proposed, committed = run_round(rule, None if price is None else block.goes_on)
            lengths.add((price, num_proposed))
            assert committed == plain[1 : num_proposed + 2]  # the drafts are the target's own: none is rejected
            while len(committed) < NUM_TOKENS:
                text = Prefixes.of(torch.tensor([[0, *committed]]))
                rule.begin_round(text, 0)
                scores = law_of(len(committed), committed[-1])[None, None]
                committed.append(int(rule.choose(0, text.ids[:, :0], scores)))
            rule.end(NUM_TOKENS)
            assert committed == plain[1:]
    assert (None, 5) in lengths
    assert len(lengths) > 4, lengths  # blocks did end early


@torch.no_grad()
@pytest.mark.parametrize("draft_pool_size", [None, 3])
@pytest.mark.parametrize("noise", [None, OwnNoise(), "shared"], ids=["greedy", "own", "shared"])
def test_a_block_knows_the_proposals_that_were_made(monkeypatch, tiny_qwen3, draft_pool_size, noise):
    drafter = build_drafter(tiny_qwen3, draft_pool_size=draft_pool_size, block_size=9)
    torch.nn.init.normal_(drafter.embed_proj[2].weight, std=2.0)
    monkeypatch.setattr(rollout_module, "EXACT_POOL_SIZE", 3)
    target, lengths = TargetModel(tiny_qwen3, drafter.config), set()
    for _ in range(30):
        hidden, prefixes = torch.randn(2, 9, 32), Prefixes.of(torch.randint(4, VOCAB_SIZE, (2, 5)))
        block = ConfidentBlock(Acceptance.by_confidence(), price=0.2, num_rows=2)
        drawn_with = torch.empty(2, 9, VOCAB_SIZE).exponential_() if noise == "shared" else noise
        proposals = rollout(drafter, target, hidden, prefixes, LAW, drawn_with, goes_on=block.goes_on)
        assert block.length == proposals.shape[1]
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

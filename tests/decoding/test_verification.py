"""The coupled rule: drafts are accepted while they are what the target takes: what `torch.multinomial` draws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw, choose
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.verification import CoupledRule, judge

VOCAB, DRAWS = 5, 40_000
SIGNIFICANCE = 1e-4  # seeds are fixed, so this is a bound on unlucky seeds, not on flakiness
LAW = TokenLaw(LogitsProcessorList())
ANY_LAW = st.lists(st.integers(0, 9), min_size=VOCAB, max_size=VOCAB).filter(any)


def prefixes_of(rows):
    return Prefixes.of(torch.zeros(rows, 3, dtype=torch.long))


def outcome(drafted, scores, noise=None):
    """Accepted proposals and the bonus token, per row."""
    judgement = judge(LAW, prefixes_of(len(drafted)), Tree(torch.tensor(drafted).long()), scores, noise)
    counts = judgement.outcome[:, :1]
    assert judgement.scores.shape == scores.shape
    return (counts[:, 0] - 1).tolist(), judgement.tokens.gather(1, counts - 1)[:, 0].tolist()


@pytest.mark.parametrize("noise", [None, torch.rand(1, 4, VOCAB) + 0.5], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("drafted", "accepted", "bonus"), [([3, 1, 2], 3, 4), ([3, 1, 0], 2, 2), ([0, 1, 2], 0, 3), ([3, 0, 2], 1, 1)]
)
def test_the_leading_matches_are_accepted(drafted, accepted, bonus, noise):
    scores = 50 * torch.nn.functional.one_hot(torch.tensor([[3, 1, 2, 4]]), VOCAB).float()
    assert outcome([drafted], scores, noise) == ([accepted], [bonus])


@pytest.mark.parametrize("is_sampled", [False, True])
def test_what_the_target_takes_is_accepted_up_to_the_first_difference(is_sampled):
    scores = torch.randn(6, 6, VOCAB)
    noise = torch.empty_like(scores).exponential_() if is_sampled else None
    taken = choose(scores, noise)
    if is_sampled:
        assert not torch.equal(taken, scores.argmax(dim=-1))
    drafted = taken[:, :-1].clone()
    for row in range(5):  # the last row has no fault
        drafted[row, row:] = (drafted[row, row:] + 1 + row % 3) % VOCAB
    assert outcome(drafted.tolist(), scores, noise) == (list(range(6)), taken.diagonal().tolist())


def test_no_proposal_is_a_plain_step():
    scores = torch.eye(VOCAB)[None, 2:3] * 50
    for noise in (None, torch.rand(1, 1, VOCAB) + 0.5):
        assert outcome([[]], scores, noise) == ([0], [2])


def test_rows_are_independent():
    scores = torch.tensor([[0.0, 9, 0, 0, 0], [0.0, 0, 9, 0, 0]]).repeat(2, 1, 1)
    assert outcome([[1], [3]], scores) == ([1, 0], [2, 1])
    noise = torch.ones(2, 2, VOCAB)
    noise[1, 0, 3] = 1e-9  # wins the second row's race
    assert outcome([[1], [3]], scores, noise) == ([1, 1], [2, 2])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(target=ANY_LAW, draft=ANY_LAW)
def test_the_first_token_has_the_targets_law(target, draft):
    torch.manual_seed(0)
    p, q = (torch.tensor(weights).double() for weights in (target, draft))
    p, q = p / p.sum(), q / q.sum()
    noise = torch.empty(DRAWS, 2, VOCAB).exponential_()
    drafted = choose(q.log().expand(DRAWS, -1), noise[:, 0])[:, None]
    judgement = judge(LAW, prefixes_of(DRAWS), Tree(drafted), p.log().expand(DRAWS, 2, -1), noise)
    counts, possible = torch.bincount(judgement.tokens[:, 0], minlength=VOCAB), p > 0
    assert counts[~possible].sum() == 0
    assert possible.sum() == 1 or chisquare(counts[possible], DRAWS * p[possible]).pvalue > SIGNIFICANCE
    # Both races are won by token i with chance 1 / sum_j max(p_j / p_i, q_j / q_i) (arXiv 2408.07978).
    both = [1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(VOCAB) if p[i] > 0 and q[i] > 0]
    assert (judgement.outcome[:, 0] - 1).double().mean().item() == pytest.approx(float(sum(both)), abs=0.015)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocab_size", [7, 64, 4_096, 151_936])
def test_tokens_and_generator_are_those_of_multinomial(vocab_size, rows):
    """Bit for bit, one step after the other, in a round and one position at a time."""
    num_steps = 4
    logits = 2 * torch.randn(rows, num_steps, vocab_size)
    logits[:, :, ::3] = -torch.inf  # no chance at all
    logits[:, 2] = logits[:, 2].where(torch.arange(vocab_size) == 4, -torch.inf)
    ids = torch.zeros(rows, 3, dtype=torch.long)
    torch.manual_seed(11)
    expected = torch.cat([torch.multinomial(logits[:, step].softmax(-1), 1) for step in range(num_steps)], dim=1)
    left_at = torch.get_rng_state()

    torch.manual_seed(11)
    rule = CoupledRule(LAW, do_sample=True)
    rule.begin(Prefixes.of(ids), vocab_size)
    tokens = rule.choose(0, ids[:, :0], logits[:, :1])
    prefixes = Prefixes.of(torch.cat((ids, tokens), dim=1))
    rule.begin_round(prefixes, num_steps + 2)  # draws ahead of what is committed
    proposals = expected[:, 1:-1]
    judgement = rule.judge(prefixes, Tree(proposals), logits[:, 1:])
    assert judgement.outcome[:, 0].tolist() == [num_steps - 1] * rows
    assert torch.equal(torch.cat((tokens, judgement.tokens), dim=1), expected)
    for index in range(num_steps - 1):
        token = rule.choose(index, proposals, logits[:, index + 1 : index + 2])
        assert torch.equal(token, expected[:, index + 1 : index + 2])
    rule.end(num_steps)
    assert torch.equal(torch.get_rng_state(), left_at)


def test_each_position_is_judged_behind_the_proposals_before_it():
    law = TokenLaw(LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)]))
    rule, prefixes = CoupledRule(law, do_sample=False), Prefixes.of(torch.tensor([[0]]))
    rule.begin(prefixes, VOCAB)
    assert rule.draft_noise is None
    logits = torch.tensor([5.0, 4, 3, 2, 1]).expand(1, 4, -1)
    assert rule.judge(prefixes, Tree(torch.tensor([[1, 2, 3]])), logits).outcome.tolist() == [[4, 1, 2, 3, 4]]


def test_listeners_are_told_of_the_race():
    """How sure a proposal is goes by its noise too: what the noise decides, no draft can lose."""
    told, rule = [], CoupledRule(LAW, do_sample=True)
    rule.begin(prefixes_of(2), VOCAB)
    rule.begin_round(prefixes_of(2), 3)
    scores, candidates = torch.randn(2, VOCAB), torch.tensor([[4, 0], [2, 3]])
    assert rule.listener(None) is None
    listener = rule.listener(lambda index, scores, candidates: told.append((index, scores, candidates)) or index < 2)
    assert listener(0, scores, None)
    assert not listener(2, scores[:, :2], candidates)
    noise = rule.draft_noise
    assert torch.equal(told[0][1].argmax(-1), choose(scores, noise[:, 0]))
    torch.testing.assert_close(told[1][1], scores[:, :2] - noise[:, 2].gather(1, candidates).log())
    assert told[1][2] is candidates
    rule.end(0)
    greedy = CoupledRule(LAW, do_sample=False)
    greedy.begin(prefixes_of(2), VOCAB)
    assert greedy.listener(listener) is listener

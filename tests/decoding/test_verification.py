"""The acceptance rule: greedy by cases, sampled against the target's law, for draft laws of every kind."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from hf_domino.decoding.rollout import DraftProposal
from hf_domino.decoding.sampling import sample
from hf_domino.decoding.verification import verify

VOCAB = 5
DRAWS, MANY_DRAWS = 40_000, 1_000_000
SIGNIFICANCE = 1e-4  # seeds are fixed, so this is a bound on unlucky seeds, not on flakiness


def as_scores(*rows):
    return torch.tensor(rows)[None]


@pytest.mark.parametrize(
    ("drafted", "accepted", "bonus"), [([3, 1, 2], 3, 4), ([3, 1, 0], 2, 2), ([0, 1, 2], 0, 3), ([3, 0, 2], 1, 1)]
)
def test_greedy_accepts_the_leading_matches(drafted, accepted, bonus):
    scores = torch.nn.functional.one_hot(torch.tensor([[3, 1, 2, 4]]), VOCAB).float()
    outcome = verify(DraftProposal(torch.tensor([drafted]), None), scores, do_sample=False)
    assert (outcome.num_accepted.item(), outcome.bonus.item()) == (accepted, bonus)
    assert outcome.acceptance_length.item() == accepted + 1


def test_no_proposal_is_a_plain_step():
    scores = torch.eye(VOCAB)[None, 2:3] * 50
    for do_sample in (False, True):
        outcome = verify(DraftProposal(torch.empty(1, 0, dtype=torch.long), None), scores, do_sample)
        assert (outcome.num_accepted.item(), outcome.bonus.item()) == (0, 2)


def fits(counts, probs):
    """Whether counts may come from a law; impossible outcomes must not occur at all."""
    possible = probs > 0
    expected = probs[possible].double() / probs.double().sum() * counts.sum()
    chance = chisquare(counts[possible].numpy(), expected.numpy()).pvalue if possible.sum() > 1 else 1.0
    return counts[~possible].sum() == 0 and chance > SIGNIFICANCE


def first_token(target_probs, draft_probs, greedy_draft):
    """Draw the first committed token DRAWS times, with one proposal."""
    scores = target_probs.log().expand(DRAWS, -1, -1)
    draft_scores = draft_probs.log().expand(DRAWS, 1, -1)
    tokens = draft_scores.argmax(-1) if greedy_draft else sample(draft_scores.softmax(-1))
    outcome = verify(DraftProposal(tokens, None if greedy_draft else draft_scores), scores, do_sample=True)
    first = torch.where(outcome.num_accepted > 0, tokens[:, 0], outcome.bonus)
    return first, outcome


@pytest.mark.parametrize("greedy_draft", [False, True])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    target=st.lists(st.integers(0, 9), min_size=VOCAB, max_size=VOCAB).filter(any),
    draft=st.lists(st.integers(0, 9), min_size=VOCAB, max_size=VOCAB).filter(any),
)
def test_the_first_token_has_the_targets_law(greedy_draft, target, draft):
    torch.manual_seed(0)
    p, q = (torch.tensor(weights, dtype=torch.float32) for weights in (target, draft))
    p, q = p / p.sum(), q / q.sum()
    first, outcome = first_token(torch.stack((p, p)), q[None], greedy_draft)
    assert fits(torch.bincount(first, minlength=VOCAB), p)
    # Accepted with the sum of min(p, q), or with p of the greedy draft.
    expected = p[q.argmax()] if greedy_draft else torch.minimum(p, q).sum()
    assert outcome.num_accepted.float().mean().item() == pytest.approx(expected.item(), abs=0.015)


def test_equal_laws_accept_everything_and_nothing_is_nan():
    scores = torch.randn(1, 3, VOCAB).expand(DRAWS, -1, -1)
    draft_scores = scores[:, :2]
    outcome = verify(DraftProposal(sample(draft_scores.softmax(-1)), draft_scores), scores, do_sample=True)
    assert outcome.num_accepted.float().mean() > 1.999
    assert outcome.bonus.min() >= 0


def test_rows_are_independent():
    scores = as_scores([0.0, 9.0, 0, 0, 0], [0.0, 0, 9.0, 0, 0]).repeat(2, 1, 1)
    outcome = verify(DraftProposal(torch.tensor([[1], [3]]), None), scores, do_sample=False)
    assert outcome.num_accepted.tolist() == [1, 0]
    assert outcome.bonus.tolist() == [2, 1]


def test_sample_has_the_law_of_its_weights():
    weights = torch.tensor([0.0, 1.0, 3.0, 0.0, 6.0])
    assert fits(torch.bincount(sample(weights.expand(DRAWS, -1)), minlength=VOCAB), weights)


@pytest.mark.parametrize("greedy_draft", [False, True])
def test_a_million_pairs_have_the_targets_joint_law(greedy_draft):
    """Two tokens against full enumeration; where the first is a rejection, a step of the target gives the second."""
    torch.manual_seed(1)
    (p_first, q_first), (p_second, q_second) = torch.rand(2, VOCAB), torch.rand(2, VOCAB, VOCAB)
    p_first[3], p_second[0, 2], q_second[1] = 0.0, 0.0, p_second[1]  # an impossible token, equal laws
    p_first, q_first = p_first / p_first.sum(), q_first / q_first.sum()
    p_second, q_second = p_second / p_second.sum(1, keepdim=True), q_second / q_second.sum(1, keepdim=True)

    def draw(probs):
        return probs.argmax(-1) if greedy_draft else sample(probs)

    drafted_first = draw(q_first.expand(MANY_DRAWS, -1))
    drafted_second = draw(q_second[drafted_first])
    target_probs = torch.stack((p_first.expand(MANY_DRAWS, -1), p_second[drafted_first], p_second[drafted_second]), 1)
    draft_probs = torch.stack((q_first.expand(MANY_DRAWS, -1), q_second[drafted_first]), 1)
    proposal = DraftProposal(
        torch.stack((drafted_first, drafted_second), 1), None if greedy_draft else draft_probs.log()
    )
    outcome = verify(proposal, target_probs.log(), do_sample=True)
    count, bonus = outcome.num_accepted, outcome.bonus
    first = torch.where(count > 0, drafted_first, bonus)
    next_step = sample(p_second[first])
    second = torch.where(count > 1, drafted_second, torch.where(count == 1, bonus, next_step))
    assert {0, 1, 2} == set(count.unique().tolist())
    joint = (p_first[:, None] * p_second).flatten()
    assert fits(torch.bincount(first * VOCAB + second, minlength=VOCAB**2), joint)

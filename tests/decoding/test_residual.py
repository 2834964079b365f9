"""The residual rule against the target's law, for draft laws of every kind, and what it keeps of a block."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from transformers import LogitsProcessorList

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual.rule import ResidualRule, verify
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.tree.form import Tree

VOCAB = 5
DRAWS, MANY_DRAWS = 40_000, 1_000_000
LAW = TokenLaw(LogitsProcessorList())
SIGNIFICANCE = 1e-4  # seeds are fixed, so this is a bound on unlucky seeds, not on flakiness


def sample(probs):
    """Tokens `[...]` of a law `[..., V]`."""
    return torch.multinomial(probs.flatten(0, -2), 1).view(probs.shape[:-1])


def test_no_proposal_is_a_plain_step():
    scores = torch.eye(VOCAB)[None, 2:3] * 50
    num_accepted, bonus = verify(torch.empty(1, 0, dtype=torch.long), None, scores)
    assert (num_accepted.item(), bonus.item()) == (0, 2)


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
    num_accepted, bonus = verify(tokens, None if greedy_draft else draft_scores, scores)
    return torch.where(num_accepted > 0, tokens[:, 0], bonus), num_accepted


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
    first, num_accepted = first_token(torch.stack((p, p)), q[None], greedy_draft)
    assert fits(torch.bincount(first, minlength=VOCAB), p)
    # Accepted with the sum of min(p, q), or with p of the greedy draft.
    expected = p[q.argmax()] if greedy_draft else torch.minimum(p, q).sum()
    assert num_accepted.float().mean().item() == pytest.approx(expected.item(), abs=0.015)


def test_equal_laws_accept_everything_and_nothing_is_nan():
    scores = torch.randn(1, 3, VOCAB).expand(DRAWS, -1, -1)
    draft_scores = scores[:, :2]
    num_accepted, bonus = verify(sample(draft_scores.softmax(-1)), draft_scores, scores)
    assert num_accepted.float().mean() > 1.999
    assert bonus.min() >= 0


def test_rows_are_independent():
    scores = 90 * torch.eye(VOCAB)[[1, 2]].repeat(2, 1, 1)
    num_accepted, bonus = verify(torch.tensor([[1], [3]]), None, scores)
    assert (num_accepted.tolist(), bonus.tolist()) == ([1, 0], [2, 1])


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
    drafted = torch.stack((drafted_first, drafted_second), 1)
    count, bonus = verify(drafted, None if greedy_draft else draft_probs.log(), target_probs.log())
    first = torch.where(count > 0, drafted_first, bonus)
    next_step = sample(p_second[first])
    second = torch.where(count > 1, drafted_second, torch.where(count == 1, bonus, next_step))
    assert {0, 1, 2} == set(count.unique().tolist())
    joint = (p_first[:, None] * p_second).flatten()
    assert fits(torch.bincount(first * VOCAB + second, minlength=VOCAB**2), joint)


def round_of(draws_drafts, num_rows=2):
    """A rule at the beginning of a round, and its rows' prefixes."""
    rule, prefixes = ResidualRule(LAW, draws_drafts), Prefixes.of(torch.zeros(num_rows, 4, dtype=torch.long))
    rule.begin(prefixes, VOCAB)
    rule.begin_round(prefixes, 3)
    return rule, prefixes


def test_other_tokens_than_the_candidates_were_never_drawn():
    rule, _ = round_of(draws_drafts=True)
    scores, candidates = torch.randn(2, 3), torch.tensor([[4, 0, 2], [1, 3, 0]])
    assert rule.draft_scores is None
    assert rule.listener(None)(0, scores, candidates)
    probs = rule.draft_scores.softmax(dim=-1)
    assert probs.shape == (2, 1, VOCAB)
    assert (probs > 0).sum(dim=-1).tolist() == [[3], [3]]
    torch.testing.assert_close(probs[:, 0].gather(1, candidates), scores.softmax(dim=-1))


def test_an_index_that_comes_again_takes_back_what_was_told():
    rule, prefixes = round_of(draws_drafts=True)
    told, scores = [], torch.randn(4, 2, VOCAB)
    listener = rule.listener(lambda index, scores, candidates: told.append(index) or index != 1)
    assert [listener(index, scores[index], None) for index in (0, 1, 2)] == [True, False, True]
    listener(1, scores[3], None)
    assert told == [0, 1, 2, 1]
    assert torch.equal(rule.draft_scores, torch.stack((scores[0], scores[3]), dim=1))
    rule.begin_round(prefixes, 3)
    assert rule.draft_scores is None


def test_greedy_drafts_are_certain():
    rule, prefixes = round_of(draws_drafts=False)

    def goes_on(index, scores, candidates):
        return True

    assert rule.draft_noise is None
    assert rule.listener(goes_on) is goes_on
    logits = 90 * torch.eye(VOCAB)[[3, 1, 4]].repeat(2, 1, 1)
    judgement = rule.judge(prefixes, Tree(torch.tensor([[3, 1], [3, 2]])), logits)
    assert rule.draft_scores is None
    assert judgement.outcome[0].tolist() == [3, 3, 1, 4]
    assert judgement.outcome[1, :3].tolist() == [2, 3, 1]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=["NaN", "all forbidden"])
@pytest.mark.parametrize("num_steps", [0, 5], ids=["first token", "inside a block"])
@pytest.mark.parametrize("draft_law", ["greedy", "sampled"])
def test_nothing_is_written_where_no_token_can_be_drawn(tiny_qwen3, make_drafter, value, num_steps, draft_law):
    def spoil(ids, scores):
        return torch.full_like(scores, value) if ids.shape[1] >= 9 + num_steps else scores

    drafter = make_drafter(tiny_qwen3, acceptance_rule="residual", draft_law=draft_law)
    options = {"do_sample": True, "max_new_tokens": 20, "logits_processor": [spoil], "eos_token_id": -1}
    with pytest.raises(RuntimeError, match="No token can be drawn"):
        tiny_qwen3.generate(torch.arange(5, 14)[None], assistant_model=drafter, **options)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=["NaN", "all forbidden"])
def test_a_lawless_row_is_told_from_the_others(value):
    rule, prefixes = round_of(draws_drafts=False)
    logits = 90 * torch.eye(VOCAB)[[3, 1, 4]].repeat(2, 1, 1)
    logits[1, 1] = value
    outcome = rule.judge(prefixes, Tree(torch.tensor([[3, 1], [3, 2]])), logits).outcome
    assert outcome[:, 0].tolist() == [3, 0]


@pytest.mark.parametrize("draws_drafts", [False, True])
def test_one_position_at_a_time_has_the_targets_law(draws_drafts):
    rule, _ = round_of(draws_drafts, num_rows=DRAWS)
    p, q = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2]), torch.tensor([0.5, 0.1, 0.2, 0.2, 0.0])
    scores, drafts = p.log().expand(DRAWS, 1, -1), q.log().expand(DRAWS, -1)
    if draws_drafts:
        rule.listener(None)(0, drafts, None)
    drafted = sample(q.expand(DRAWS, -1))[:, None] if draws_drafts else drafts.argmax(dim=1, keepdim=True)
    tokens = rule.choose(0, drafted, scores)
    assert fits(torch.bincount(tokens[:, 0], minlength=VOCAB), p)
    expected = torch.minimum(p, q).sum() if draws_drafts else p[0]
    assert (tokens == drafted).float().mean().item() == pytest.approx(expected.item(), abs=0.015)
    behind = rule.choose(1, drafted, scores)  # all were accepted
    assert fits(torch.bincount(behind[:, 0], minlength=VOCAB), p)

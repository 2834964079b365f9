"""Block verification: the target's joint law over many draws, what it accepts, and rows without a law."""

import math

import pytest
import torch
from scipy.stats import chisquare

from hf_domino.decoding.residual.block import accept_block, prefix_weights

VOCAB, DRAFTED = 3, 3
DRAWS, MANY_DRAWS = 100_000, 400_000
SIGNIFICANCE = 1e-4  # seeds are fixed, so this is a bound on unlucky seeds, not on flakiness
BY_CHANCE = 5 / math.sqrt(DRAWS)  # five standard errors, at most, of an average of lengths that deviate by 1


def sample(weights):
    return (weights / torch.empty_like(weights).exponential_()).argmax(dim=-1)


def random_law():
    """The next token's law behind every text of up to DRAFTED tokens; behind N of them `[V] * N + [V]`."""
    weights = [torch.rand([VOCAB] * (length + 1)) ** 3 for length in range(DRAFTED + 1)]
    return [table / table.sum(dim=-1, keepdim=True) for table in weights]


def at(law, tokens, length):
    """The law `[N, V]` of the token behind the first `length` of `[N, P]`."""
    return law[length][tuple(tokens[:, :length].T)].expand(len(tokens), -1)


def draft(law, is_greedy):
    tokens = torch.empty(MANY_DRAWS, 0, dtype=torch.long)
    for length in range(DRAFTED):
        probs = at(law, tokens, length)
        tokens = torch.cat((tokens, (probs.argmax(-1) if is_greedy else sample(probs))[:, None]), dim=1)
    return tokens


def one_round(target, drafter, tokens, is_greedy):
    """The first DRAFTED + 1 tokens of a text: a round's, then single steps of the target; and how many it accepted."""
    num_drafted = tokens.shape[1]
    target_probs = torch.stack([at(target, tokens, length) for length in range(num_drafted + 1)], dim=1)
    draft_probs = torch.stack([at(drafter, tokens, length) for length in range(num_drafted)], dim=1)
    if is_greedy:
        draft_probs = torch.nn.functional.one_hot(tokens, VOCAB).float()
    accepted, weights = accept_block(tokens, target_probs, draft_probs, torch.rand(tokens.shape))
    text, bonus = torch.nn.functional.pad(tokens, (0, DRAFTED + 1 - num_drafted)), sample(weights)
    for length in range(DRAFTED + 1):
        behind = torch.where(accepted == length, bonus, sample(at(target, text, length)))
        text[:, length] = torch.where(accepted > length, text[:, length], behind)
    return text, accepted


@pytest.mark.parametrize("is_greedy", [False, True])
def test_many_texts_have_the_targets_joint_law(is_greedy):
    """Against full enumeration; where drafts are drawn, the first one says whether the block ends with it."""
    torch.manual_seed(2)  # laws under which every count of proposals is accepted often
    target, drafter = random_law(), random_law()
    drafter[1][0], target[1][1] = target[1][0], torch.tensor([0.25, 0.0, 0.75])  # equal laws, an impossible token
    tokens = draft(drafter, is_greedy)
    ends = (tokens[:, 0] == 2) & (not is_greedy)
    short, _ = one_round(target, drafter, tokens[ends, :1], is_greedy)
    long, accepted = one_round(target, drafter, tokens[~ends], is_greedy)
    assert set(range(DRAFTED + 1)) == set(accepted.unique().tolist())
    joint = target[0]
    for table in target[1:]:
        joint = joint[..., None] * table
    places = VOCAB ** torch.arange(DRAFTED, -1, -1)
    counts = torch.bincount((torch.cat((short, long)) * places).sum(dim=1), minlength=joint.numel())
    possible, expected = joint.flatten() > 0, joint.flatten().double() / joint.sum() * MANY_DRAWS
    assert counts[~possible].sum() == 0
    observed, expected = counts[possible].numpy(), expected[possible].numpy()
    assert chisquare(observed, expected * (observed.sum() / expected.sum())).pvalue > SIGNIFICANCE


def test_accepts_what_the_paper_promises():
    """Its example: 11/9 of two drafts, where the rule of single tokens accepts 10/9."""
    torch.manual_seed(0)
    target_probs = torch.tensor([1 / 3, 2 / 3]).expand(DRAWS, 3, -1)
    draft_probs = torch.tensor([2 / 3, 1 / 3]).expand(DRAWS, 2, -1)
    tokens = sample(draft_probs)
    accepted, _ = accept_block(tokens, target_probs, draft_probs, torch.rand(tokens.shape))
    assert accepted.float().mean().item() == pytest.approx(11 / 9, abs=BY_CHANCE)


def test_equal_laws_accept_everything():
    torch.manual_seed(0)
    target_probs = torch.randn(DRAWS, 9, VOCAB).softmax(-1)
    tokens = sample(target_probs[:, :-1])
    accepted, weights = accept_block(tokens, target_probs, target_probs[:, :-1], torch.rand(tokens.shape))
    assert (accepted == 8).all()
    torch.testing.assert_close(weights, target_probs[:, -1])
    # Rounding may reject all the same; nothing is left then, and the bonus token is drawn from the law itself.
    accepted, weights = accept_block(tokens, target_probs, target_probs[:, :-1], torch.ones(tokens.shape))
    assert (accepted == 0).all()
    assert torch.equal(weights, target_probs[:, 0])


def test_nothing_is_drafted():
    target_probs = torch.rand(2, 1, VOCAB)
    nothing = torch.empty(2, 0)
    accepted, weights = accept_block(nothing.long(), target_probs, torch.empty(2, 0, VOCAB), nothing)
    assert accepted.tolist() == [0, 0]
    torch.testing.assert_close(weights, target_probs[:, 0])


@pytest.mark.parametrize("dead", ["target", "draft", "both"])
def test_rows_behind_the_texts_end_need_no_law(dead):
    """All tokens forbidden is a row of NaN; the proposals before it are accepted as if the block ended there."""
    torch.manual_seed(0)
    target_probs, draft_probs = torch.rand(1, 4, VOCAB).softmax(-1), torch.rand(1, 3, VOCAB).softmax(-1)
    target_probs, draft_probs = target_probs.repeat(DRAWS, 1, 1), draft_probs.repeat(DRAWS, 1, 1)
    tokens, uniforms = sample(draft_probs), torch.rand(DRAWS, 3)
    expected, _ = accept_block(tokens[:, :2], target_probs[:, :3], draft_probs[:, :2], uniforms[:, :2])
    if dead != "draft":
        target_probs[:, 2] = math.nan
    if dead != "target":
        draft_probs[:, 2] = math.nan
    accepted, _ = accept_block(tokens, target_probs, draft_probs, uniforms)
    assert torch.equal(accepted, expected)
    assert (prefix_weights(tokens, target_probs, draft_probs)[:, 3] == 0).all()
    assert {0, 1, 2} == set(accepted.unique().tolist())

"""The residual rule, which verifies blocks: the target's joint law over many draws, and rows without a law.

Through `generate` its law is tested in `tests/test_sampling_law.py`.
"""

import math

import pytest
import torch
from chance import chi_square
from transformers import LogitsProcessorList

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual import ResidualRule, accept_block
from hf_domino.decoding.sampling import TokenLaw

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


def fits(counts, law):
    """Whether counts may come from a law; what is impossible must not occur at all."""
    possible = law > 0
    observed, expected = counts[possible], law[possible].double()
    chance = chi_square(observed, expected * (observed.sum() / expected.sum()))
    return counts[~possible].sum() == 0 and chance > SIGNIFICANCE


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
    assert fits(counts, joint.flatten())


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
    assert {0, 1, 2} == set(accepted.unique().tolist())


@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=["NaN", "all forbidden"])
@pytest.mark.parametrize(("num_steps", "draft_law"), [(0, "sampled"), (5, "sampled"), (5, "greedy")])
def test_nothing_is_written_where_no_token_can_be_drawn(tiny_qwen3, make_drafter, value, num_steps, draft_law):
    def spoil(ids, scores):
        return torch.full_like(scores, value) if ids.shape[1] >= 9 + num_steps else scores

    drafter = make_drafter(tiny_qwen3, acceptance_rule="residual", draft_law=draft_law)
    options = {"do_sample": True, "max_new_tokens": 20, "logits_processor": [spoil], "eos_token_id": -1}
    with pytest.raises(RuntimeError, match="No token can be drawn"):
        tiny_qwen3.generate(torch.arange(5, 14)[None], assistant_model=drafter, **options)


@pytest.mark.parametrize("draws_drafts", [False, True])
def test_one_position_at_a_time_has_the_targets_law(draws_drafts):
    """As where a processor keeps state."""
    rule, prefixes = (
        ResidualRule(TokenLaw(LogitsProcessorList()), draws_drafts),
        Prefixes.of(torch.zeros(DRAWS, 4).long()),
    )
    rule.begin(prefixes, VOCAB)
    rule.begin_round(prefixes, 3)
    p, q = torch.tensor([0.1, 0.0, 0.9]), torch.tensor([0.5, 0.3, 0.2])
    scores, drafts = p.log().expand(DRAWS, 1, -1), q.log().expand(DRAWS, -1)
    if draws_drafts:
        rule.draft_noise(drafts[:, None], torch.arange(VOCAB).expand(DRAWS, 1, -1))
    drafted = sample(q.expand(DRAWS, -1))[:, None] if draws_drafts else drafts.argmax(dim=1, keepdim=True)
    for index in (0, 1):  # where one was drafted, and behind it
        tokens = rule.choose(index, drafted, scores)[:, 0]
        assert fits(torch.bincount(tokens, minlength=VOCAB), p)
        expected = torch.minimum(p, q).sum() if draws_drafts else p[0]
        assert index or (tokens == drafted[:, 0]).float().mean().item() == pytest.approx(expected.item(), abs=BY_CHANCE)

"""Candidate pools: the likeliest tokens, whose law is what the whole vocabulary's says of them."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
)

from hf_domino.decoding.correcting.candidates import CandidatePool
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw, choose

VOCAB, SIZE = 40, 7

try:
    LESS_PADDING = [RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.tensor([4, 1]))]
except ValueError:  # one number for all rows, in older versions
    LESS_PADDING = []


@pytest.fixture
def prefixes():
    return Prefixes(torch.randint(0, VOCAB, (2, 9)), [9, 5], [0, 1])


@pytest.mark.parametrize(
    "processors",
    [
        [],
        [RepetitionPenaltyLogitsProcessor(1.7)],
        [RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=3)],
        pytest.param(LESS_PADDING, marks=pytest.mark.skipif(not LESS_PADDING, reason="newer transformers only")),
        [TemperatureLogitsWarper(0.6), RepetitionPenaltyLogitsProcessor(0.8), TemperatureLogitsWarper(1.4)],
        [
            NoRepeatNGramLogitsProcessor(1),
            RepetitionPenaltyLogitsProcessor(1.2),
            TemperatureLogitsWarper(0.6),
            SequenceBiasLogitsProcessor([[[5], 2.0], [[6, 7], 3.0]]),
        ],
    ],
    ids=["nothing", "penalty", "less a start", "less padding", "mixed", "many"],
)
def test_scores_are_the_whole_vocabularys(prefixes, processors):
    law = TokenLaw(LogitsProcessorList(processors))
    logits = 3 * torch.randn(2, 4, VOCAB)
    pool, chosen = CandidatePool(logits, SIZE, law, prefixes), prefixes.ids[:, :0]
    for index in range(4):
        candidates = pool.token_ids[:, index]
        expected = law.scores(prefixes, logits[:, index : index + 1], chosen)[:, 0]
        torch.testing.assert_close(pool.scores(pool.logits[:, index], chosen), expected.gather(1, candidates))
        assert torch.equal(pool.logits[:, index], logits[:, index].gather(1, candidates))
        choice = torch.tensor([[0], [3]])  # likely tokens come up again at later positions
        chosen = torch.cat((chosen, candidates.gather(1, choice)), dim=1)


def test_the_candidates_are_the_likeliest(prefixes):
    logits = torch.randn(2, 3, VOCAB)
    pool = CandidatePool(logits, SIZE, TokenLaw(LogitsProcessorList()), prefixes)
    assert torch.equal(pool.token_ids, logits.topk(SIZE).indices)
    assert torch.equal(pool.logits, logits.topk(SIZE).values)


def test_lucky_tokens_are_candidates():
    """A draw can fall on any token that its noise favours enough, and on no other."""
    torch.manual_seed(0)
    logits, prefixes = 3 * torch.randn(1, 50, 400), Prefixes.of(torch.zeros(1, 2).long())
    noise = torch.empty_like(logits).exponential_()
    law = TokenLaw(LogitsProcessorList([TemperatureLogitsWarper(2.5), TemperatureLogitsWarper(0.6)]))
    drawn = choose(logits / 1.5, noise)
    pools = [CandidatePool(logits, SIZE, law, prefixes, *extra).token_ids for extra in ((noise,), ())]
    with_luck, without = ((pool == drawn[..., None]).any(dim=2) for pool in pools)
    assert with_luck.all()
    assert 0.1 < without.float().mean() < 0.9


def test_ids_that_are_no_tokens_are_held_by_no_row():
    """As those of images, above the vocabulary, or below 0 in the place of embeddings."""
    prefixes = Prefixes(torch.tensor([[5, 70, 6, 7], [-1, 3, 5, 5]]), [3, 2], [0, 1])
    held = prefixes.hold(torch.tensor([[5, 6, 7, 63], [5, 3, 0, 63]]), [0, 0], 64)
    assert held.tolist() == [[True, True, False, False], [False, True, False, False]]


@pytest.mark.parametrize("lengths", [[1, 1], [3, 1], [3, 3]], ids=str)
def test_endings_are_as_wide_as_they_are_asked_for(lengths):
    prefixes = Prefixes(torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]]), lengths, [0, 1])
    endings = prefixes.endings(2)
    assert endings.shape == (2, 2)
    assert endings[:, -1:].equal(prefixes.last())
    assert lengths[0] == 1 or endings[0].tolist() == [6, 7]

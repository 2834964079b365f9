"""Candidate pools: the law of the candidates is the whole vocabulary's, and drafts stay a law verification can use."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from hf_domino.decoding.correcting.candidates import CandidatePool, fits_pool
from hf_domino.decoding.sampling import Prefixes, TokenLaw

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
    ],
    ids=["nothing", "penalty", "less a start", "less padding", "mixed"],
)
def test_scores_are_the_whole_vocabularys(prefixes, processors):
    law = TokenLaw(LogitsProcessorList(processors), do_sample=False)
    logits = 3 * torch.randn(2, 4, VOCAB)
    pool, chosen = CandidatePool(logits, SIZE, law.processors, prefixes), prefixes.ids[:, :0]
    for index in range(4):
        expected = law.scores(prefixes, logits[:, index : index + 1], chosen)[:, 0]
        scores = pool.scores(index, pool.logits[:, index])
        torch.testing.assert_close(scores, expected.gather(1, pool.token_ids[:, index]))
        assert torch.equal(pool.logits[:, index], logits[:, index].topk(SIZE).values)
        token = pool.take(index, torch.tensor([0, 3]))  # likely tokens come up again at later positions
        assert token.tolist() == [int(pool.token_ids[0, index, 0]), int(pool.token_ids[1, index, 3])]
        chosen = torch.cat((chosen, token[:, None]), dim=1)


def test_other_tokens_are_never_drawn(prefixes):
    logits = torch.randn(2, 3, VOCAB)
    pool = CandidatePool(logits, SIZE, LogitsProcessorList(), prefixes)
    probs = pool.spread(pool.logits).softmax(dim=-1)
    assert (probs > 0).sum(dim=-1).tolist() == [[SIZE] * 3] * 2
    torch.testing.assert_close(probs.gather(2, pool.token_ids), pool.logits.softmax(dim=-1))


def test_processors_that_name_tokens_need_the_vocabulary():
    penalty = RepetitionPenaltyLogitsProcessor(1.1)
    assert fits_pool([TemperatureLogitsWarper(0.5), penalty])
    assert not fits_pool([penalty, penalty])
    assert not fits_pool([NoRepeatNGramLogitsProcessor(2)])
    assert not fits_pool([TemperatureLogitsWarper(0.5), MinLengthLogitsProcessor(5, 0)])

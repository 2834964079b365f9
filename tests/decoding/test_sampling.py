"""Processed scores of a block equal those of one position after the other, and draws have the law of their scores."""

import pytest
import torch
from scipy.stats import chisquare
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw, choose

VOCAB, DRAWS = 12, 40_000
SIGNIFICANCE = 1e-4  # the seed is fixed, so this is a bound on unlucky seeds, not on flakiness
LISTS = {
    "none": [],
    "warpers": [hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(5), hf.TopPLogitsWarper(0.9)],
    "penalty": [hf.RepetitionPenaltyLogitsProcessor(1.3)],
    "penalty, warpers": [hf.RepetitionPenaltyLogitsProcessor(1.3), hf.TemperatureLogitsWarper(0.7)],
    "order matters": [hf.NoRepeatNGramLogitsProcessor(2), hf.RepetitionPenaltyLogitsProcessor(1.3)],
    "warper first": [hf.TopKLogitsWarper(6), hf.MinLengthLogitsProcessor(9, [3])],
}


@pytest.mark.parametrize("processors", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_block_equals_position_after_position(processors, batch):
    processors = LogitsProcessorList(processors)
    prefix, continuation = torch.randint(0, VOCAB, (batch, 6)), torch.randint(0, VOCAB, (batch, 4))
    logits = torch.randn(batch, 5, VOCAB)
    untouched = logits.clone()
    scores = TokenLaw(processors).scores(Prefixes.of(prefix), logits, continuation)
    ids = torch.cat((prefix, continuation), dim=1)
    for index in range(5):
        wanted = processors(ids[:, : 6 + index], logits[:, index].clone())
        torch.testing.assert_close(scores[:, index], wanted)
    assert torch.equal(logits, untouched)


def test_drafts_go_without_processors_that_may_keep_state():
    class Custom(hf.LogitsProcessor):
        def __call__(self, input_ids, scores):
            raise AssertionError("called on a draft")

    processors = LogitsProcessorList([Custom(), hf.TemperatureLogitsWarper(0.5)])
    law = TokenLaw(processors).without_state()
    logits = torch.randn(1, 1, VOCAB)
    torch.testing.assert_close(
        law.scores(Prefixes.of(torch.zeros(1, 2).long()), logits, torch.zeros(1, 0).long()), logits * 2
    )


def test_without_noise_the_likeliest_is_taken():
    scores = torch.randn(2, 3, VOCAB)
    assert torch.equal(choose(scores), scores.argmax(dim=-1))


def test_draws_have_the_law_of_their_scores():
    probs = torch.tensor([0.0, 0.1, 0.3, 0.0, 0.6], dtype=torch.float64)
    noise = torch.empty(DRAWS, 5).exponential_()
    counts = torch.bincount(choose(probs.log().expand(DRAWS, -1), noise), minlength=5)
    assert counts[probs == 0].sum() == 0
    assert chisquare(counts[probs > 0], DRAWS * probs[probs > 0]).pvalue > SIGNIFICANCE

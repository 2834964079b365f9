"""Processed scores of a block equal those of one position after the other, whatever the processors."""

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw, draft_law

VOCAB = 12
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
    scores = TokenLaw(processors, do_sample=True).scores(Prefixes.of(prefix), logits, continuation)
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
    law = draft_law(TokenLaw(processors, do_sample=True))
    logits = torch.randn(1, 1, VOCAB)
    torch.testing.assert_close(
        law.scores(Prefixes.of(torch.zeros(1, 2).long()), logits, torch.zeros(1, 0).long()), logits * 2
    )
    assert law.do_sample


@pytest.mark.parametrize(
    ("target_samples", "choice", "expected"),
    [(True, "sampled", True), (True, "greedy", False), (False, "sampled", False)],
)
def test_the_draft_law(target_samples, choice, expected):
    law = TokenLaw(LogitsProcessorList(), do_sample=target_samples)
    assert draft_law(law, choice).do_sample is expected

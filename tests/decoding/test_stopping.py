"""Nobody is asked about text behind its end: tries, automata and grammars know no such prefix."""

from __future__ import annotations

import pytest
import torch
from builders import EOS, left_padded
from oracle import oracle
from transformers import StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

import hf_domino

pytestmark = pytest.mark.transformers

PROMPTS = [torch.arange(7, 20), torch.arange(30, 38), torch.arange(40, 45)]
LENGTH = 13
BUDGET = 14
OPTIONS = {"do_sample": False, "max_new_tokens": BUDGET}


class Automaton:
    """One state per new token, known up to the last one that `generate` asks for; the text may end in some states."""

    def __init__(self, end: int, last: int = BUDGET):
        self.tokens = [list(range(4 + state % 3, 64, 3)) for state in range(last)]
        self.end, self.asked = end, 0

    def strict(self, row: int, ids: torch.Tensor) -> list[int]:
        """Fail as automata do, behind an end of text or the last state."""
        new, self.asked = ids[LENGTH:].tolist(), self.asked + 1
        if EOS in new:
            raise KeyError(EOS)
        # Rows end at different times.
        return [EOS] if len(new) == self.end + row else self.tokens[len(new)]

    def lenient(self, row: int, ids: torch.Tensor) -> list[int]:
        """Plain `generate` asks about a batch's rows that have ended, too."""
        return [EOS] if EOS in ids[LENGTH:].tolist() else self.strict(row, ids)


def plain_row(target, ids, mask, row, automaton):
    """What the target alone says in one row of a batch."""
    allowed = {"prefix_allowed_tokens_fn": lambda _, prefix: automaton.strict(row, prefix)}
    here = slice(row, row + 1)
    return target.generate(ids[here], attention_mask=mask[here], **OPTIONS, **allowed)[0]


@pytest.fixture(params=[{}, {"cache_implementation": "static"}], ids=["growing", "static"])
def entry(request):
    """Options for each of the loops."""
    yield request.param
    hf_domino.release_workspaces()


def assisted(target, drafter, ids, mask, automaton, **options):
    lenient = {"prefix_allowed_tokens_fn": automaton.lenient, "eos_token_id": EOS}
    with oracle(target, ids, 0.8, attention_mask=mask, **OPTIONS, **lenient):
        allowed = {"prefix_allowed_tokens_fn": automaton.strict}
        return target.generate(ids, attention_mask=mask, assistant_model=drafter, **OPTIONS, **allowed, **options)


@pytest.mark.parametrize("end", [4, BUDGET + 1])
def test_one_prompt(tiny_qwen3, tiny_drafter, entry, end):
    automaton = Automaton(end)
    ids, mask = left_padded(PROMPTS[:1])
    output = assisted(tiny_qwen3, tiny_drafter, ids, mask, automaton, **entry)
    assert torch.equal(output[0], plain_row(tiny_qwen3, ids, mask, 0, automaton))
    assert output.shape[1] == LENGTH + min(end + 1, BUDGET)
    assert tiny_drafter.stats.acceptance_length > 1.5


@pytest.mark.parametrize("end", [4, BUDGET - 2])
def test_padded_batch(tiny_qwen3, tiny_drafter, end):
    automaton = Automaton(end)
    ids, mask = left_padded(PROMPTS)
    output = assisted(tiny_qwen3, tiny_drafter, ids, mask, automaton)
    for row, text in enumerate(output):
        truth = plain_row(tiny_qwen3, ids, mask, row, automaton)
        assert torch.equal(text[: len(truth)], truth)


def test_texts_longer_than_the_target_has_positions_are_warned_of(tiny_qwen3, make_drafter, monkeypatch):
    monkeypatch.setattr(tiny_qwen3.config, "max_position_embeddings", 16)
    said, drafter = [], make_drafter(tiny_qwen3, max_position_embeddings=64)
    monkeypatch.setattr("transformers.generation.stopping_criteria.logger.warning_once", said.append)
    for num_new in (13, 20):
        assert said == []
        tiny_qwen3.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=num_new)
    assert "maximum length (16)" in said[0]


@pytest.mark.parametrize("limits", [[22], [60], [60, 35]], ids=str)
@pytest.mark.parametrize(("cache", "accuracy"), [("growing", 0.0), ("static", 0.9), ("batch", 0.9)])
def test_limits_of_the_caller_take_precedence(tiny_qwen3, tiny_drafter, cache, limits, accuracy):
    """`generate` puts a caller's first limit in the place of its own, be it shorter or longer."""
    ids, mask = left_padded(PROMPTS if cache == "batch" else PROMPTS[:1])
    criteria = StoppingCriteriaList(MaxLengthCriteria(limit) for limit in limits)
    options = {"attention_mask": mask, "stopping_criteria": criteria, "eos_token_id": -1, "pad_token_id": 0} | OPTIONS
    plain = tiny_qwen3.generate(ids, **options)
    assert plain.shape[1] == min(limits)
    with oracle(tiny_qwen3, ids, accuracy, **options):
        static = {"cache_implementation": "static"} if cache == "static" else {}
        assert torch.equal(tiny_qwen3.generate(ids, assistant_model=tiny_drafter, **options, **static), plain)


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_prompt_behind_the_callers_limit_is_asked_about_the_token_that_follows(tiny_qwen3, tiny_drafter, cache):
    ids, criteria = PROMPTS[0][None], StoppingCriteriaList([MaxLengthCriteria(LENGTH - 3)])
    allowed = {"stopping_criteria": criteria, "prefix_allowed_tokens_fn": lambda _, ids: [len(ids) + 20]} | OPTIONS
    expected = torch.cat((ids, torch.tensor([[LENGTH + 20]])), dim=1)
    assert torch.equal(tiny_qwen3.generate(ids, **allowed), expected)
    text = tiny_qwen3.generate(ids, assistant_model=tiny_drafter, cache_implementation=cache, **allowed)
    assert torch.equal(text, expected)

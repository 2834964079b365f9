"""Rounds that copy from the text in place of drafting: no text changes, and they are worth their time."""

import pytest
import torch
from builders import PAD, build_drafter, left_padded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import oracle, proposed
from recorded_graphs import recorded_graphs
from test_families import build

from hf_domino.decoding.policy import LOOKUP
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.prompt_lookup import LENGTHS, MOST_PLACES, PromptLookup, Text
from hf_domino.decoding.round import Outcome, Plan

PASSAGE = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
PROMPT = torch.tensor([[*PASSAGE, 5, 6, *PASSAGE, 7]])
GREEDY = {"do_sample": False, "max_new_tokens": 36, "eos_token_id": -1}
SAMPLED = {"do_sample": True, "temperature": 0.3, "top_k": 0, "max_new_tokens": 36, "eos_token_id": -1}
COPYING = {"prompt_lookup_num_tokens": 10}
PRICE = 0.05
"""Tokens that one more copy must bring."""


def generate(target, prompt, seed=0, **options):
    torch.manual_seed(seed)
    return target.generate(prompt, **options).tolist()


def longest_by_hand(tokens):
    """The longest repetition of the last tokens, by comparing with every place of the text."""
    best = (0, 0)
    for end in range(2, len(tokens)):
        length = 0
        while length < min(end, LENGTHS[-1]) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, (length, end)) if length >= 2 else best
    return best


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(tokens=st.lists(st.integers(0, 2), max_size=MOST_PLACES), split=st.integers(0, MOST_PLACES))
def test_the_longest_match_is_found(tokens, split):
    text = Text()
    text.extend(tokens[:split])
    text.extend(tokens[split:])
    assert text.longest_match() == longest_by_hand(tokens)


def test_a_copy_goes_on_behind_the_end_with_what_was_copied():
    text = Text()
    text.extend([9, 1, 2, 3, 1, 2])
    assert text.longest_match() == (2, 3)
    assert text.behind(3, 8) == [3, 1, 2, 3, 1, 2, 3, 1]


@pytest.mark.parametrize(("draft_length", "cache"), [("full", None), ("full", "static"), ("adaptive", None)])
@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_that_of_plain_generation(tiny_qwen3, make_drafter, options, draft_length, cache, forward_clock):
    drafter = make_drafter(tiny_qwen3, draft_length=draft_length)
    copying = options | COPYING | {"assistant_model": drafter, "cache_implementation": cache}
    assert generate(tiny_qwen3, PROMPT, **copying) == generate(tiny_qwen3, PROMPT, **options)
    assert drafter.stats.num_lookups > 0


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_of_unequal_rows(tiny_qwen3, make_drafter, options):
    rows = [PROMPT[0], PROMPT[0, 9:], torch.tensor([7, 8, 7, 8, 7])]
    ids, mask = left_padded(rows, PAD)
    drafter, inputs = make_drafter(tiny_qwen3), {"attention_mask": mask, "pad_token_id": PAD}
    plain = generate(tiny_qwen3, ids, **inputs, **options)
    assert generate(tiny_qwen3, ids, assistant_model=drafter, **inputs, **options, **COPYING) == plain
    stats = drafter.stats
    assert 0 < stats.num_lookups < stats.num_rounds
    assert [len(row) for row in stats.looked_up] == [len(row) for row in stats.rows]


def test_drafts_after_copied_rounds_are_those_of_a_drafter_that_saw_all(tiny_qwen3, make_drafter):
    """Rounds that copy leave their hidden states to the next draft."""
    drafter = make_drafter(tiny_qwen3)
    with proposed() as rounds:
        generate(tiny_qwen3, PROMPT, assistant_model=drafter, **GREEDY)
    known = {len(ids): tokens for _, ids, tokens in rounds}
    with proposed() as rounds:
        generate(tiny_qwen3, PROMPT, assistant_model=drafter, **GREEDY, **COPYING)
    assert drafter.stats.num_lookups
    twice = [(known[len(ids)], tokens) for _, ids, tokens in rounds if len(ids) in known]
    assert len(twice) > 2
    assert all(first[: len(second)] == second[: len(first)] for first, second in twice)


def lookup_in(tokens, most=10, vocab_size=64, **options):
    """Prompt lookup in a text, and the text as a prefix."""
    lookup = PromptLookup(most, vocab_size, **options)
    lookup.read = lambda row, start: tokens[start:]
    return lookup, Prefixes.of(torch.tensor([tokens]))


def test_no_copy_goes_further_past_the_end_than_a_draft_may(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3)
    says_one_token = GREEDY | {"sequence_bias": [[[9], 1000.0]], "max_new_tokens": 80}
    prompt = torch.full((1, 60), 9)
    options = says_one_token | {"assistant_model": drafter, "prompt_lookup_num_tokens": 10_000}
    assert generate(tiny_qwen3, prompt, **options) == generate(tiny_qwen3, prompt, **says_one_token)
    assert drafter.stats.lookup_length > 20
    lengths, proposed = drafter.stats.rows[0], drafter.stats.proposed[0]
    assert sum(lengths[:-1]) + proposed[-1] + 1 <= drafter.stats.num_new_tokens + drafter.config.num_draft_tokens


def test_what_has_no_logits_is_not_copied():
    lookup, prefixes = lookup_in([*PASSAGE, 70, -200, 5, *PASSAGE], vocab_size=64)
    offer = lookup.offer(prefixes, 10, PRICE)
    assert lookup.proposals(offer, prefixes)[0, :3].tolist() == [63, 0, 5]


def test_copies_that_fail_promise_nothing_and_those_that_hold_more():
    for num_accepted in (0, 10):
        lookup, prefixes = lookup_in([*PASSAGE, 5, *PASSAGE[:4]])
        first = offer = lookup.offer(prefixes, 10, PRICE)
        for _ in range(30):
            plan = Plan(LOOKUP, offer.length, offer)
            lookup.observe(Outcome(plan, [0], offer.length, [min(num_accepted, offer.length) + 1]))
            offer = lookup.offer(prefixes, 10, PRICE) or offer
        assert (offer.expected > first.expected) == (num_accepted > 0)
        assert offer.expected > 8 if num_accepted else offer.expected < 1.1


def test_what_is_drafted_teaches_nothing_of_copies():
    lookup, prefixes = lookup_in([*PASSAGE, 5, *PASSAGE[:4]])
    first = lookup.offer(prefixes, 10, PRICE).expected
    for _ in range(10):
        lookup.observe(Outcome(Plan(LOOKUP, 4), [0], 4, [1]))
    assert lookup.offer(prefixes, 10, PRICE).expected == first


@pytest.mark.parametrize(("wanted", "lengths"), [(10, {1, 2, 4, 6}), (3, {1, 2})])
def test_copies_of_fixed_shape_have_one_of_a_few_lengths(tiny_qwen3, make_drafter, wanted, lengths):
    drafter = make_drafter(tiny_qwen3)
    options = GREEDY | {"prompt_lookup_num_tokens": wanted, "cache_implementation": "static"}
    with recorded_graphs():
        text = generate(tiny_qwen3, PROMPT, assistant_model=drafter, **options)
    assert text == generate(tiny_qwen3, PROMPT, **GREEDY)
    rounds = zip(drafter.stats.proposed[0], drafter.stats.looked_up[0], strict=True)
    found = {count for count, is_lookup in rounds if is_lookup}
    assert found
    assert found <= lengths


def test_a_copy_is_as_long_as_its_match_is_sure():
    lengths = []
    for match in (2, 4, 12):
        tokens = [*PASSAGE, *range(30, 60), 5, *PASSAGE[12 - match :]]
        lookup, prefixes = lookup_in(tokens, most=40)
        offer = lookup.offer(prefixes, 40, PRICE)
        lengths.append(offer.length)
        assert offer.tokens == [tokens[12 : 12 + offer.length]]
    assert lengths == sorted(set(lengths))
    assert lookup.offer(prefixes, 40, 0.3).length < offer.length
    assert lookup_in(tokens, most=3)[0].offer(prefixes, 40, PRICE).length == 3
    assert lookup.offer(prefixes, 2, PRICE).length == 2
    assert lookup.offer(prefixes, 0, PRICE) is None


ROPE = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}


@pytest.mark.parametrize(
    ("family", "fields", "left"), [("Mistral", {}, None), ("Gemma2", {}, None), ("Qwen2", ROPE, 20), ("GPT2", {}, 0)]
)
def test_targets_of_windows_and_of_positions_that_end(family, fields, left):
    """Neither drafts nor copies go behind the last position, nor where rotary frequencies change."""
    target, options = build(family, **fields), GREEDY
    if left is not None:
        options |= {"max_new_tokens": target.config.max_position_embeddings - PROMPT.shape[1] - left}
    drafter, copying = build_drafter(target), {"prompt_lookup_num_tokens": 10_000}
    plain = generate(target, PROMPT, **options)
    assert generate(target, PROMPT, assistant_model=drafter, **options, **copying) == plain
    assert drafter.stats.num_lookups


def test_a_conversation_goes_on(tiny_qwen3, make_drafter):
    """Its next turn copies from all of it."""
    drafter = make_drafter(tiny_qwen3)
    options = GREEDY | {"max_new_tokens": 12, "return_dict_in_generate": True}
    texts = []
    for extra in ({}, {"assistant_model": drafter, **COPYING}):
        turn = tiny_qwen3.generate(PROMPT, **options, **extra)
        ids = torch.cat((turn.sequences, PROMPT[:, :4]), dim=1)
        turn = tiny_qwen3.generate(ids, past_key_values=turn.past_key_values, **options, **extra)
        texts.append(turn.sequences.tolist())
    assert texts[0] == texts[1]
    assert drafter.stats.num_lookups


def test_statistics_tell_copies_from_drafts(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3)
    with oracle(tiny_qwen3, PROMPT, 0.5, **{name: GREEDY[name] for name in ("do_sample", "max_new_tokens")}):
        tiny_qwen3.generate(PROMPT, assistant_model=drafter, **GREEDY, **COPYING)
    stats = drafter.stats
    assert stats.num_drafted + stats.num_lookups + stats.num_plain_steps == stats.num_rounds
    total = stats.num_drafted * stats.acceptance_length + stats.num_lookups * stats.lookup_length
    assert total + stats.num_plain_steps == pytest.approx(stats.num_rounds * stats.tokens_per_forward)
    assert max(stats.proposed[0]) > drafter.config.num_draft_tokens  # of copies
    assert f"{'  with prompt lookup':<24}{stats.num_lookups}" in str(stats)
    tiny_qwen3.generate(PROMPT, assistant_model=drafter, **GREEDY)
    assert drafter.stats.num_lookups == 0
    assert "copied" not in str(drafter.stats)


def test_every_round_that_copies_is_learnt_from(tiny_qwen3, tiny_drafter, monkeypatch):
    seen, observe = [], PromptLookup.observe

    def noted(self, outcome):
        seen.append(outcome.plan.offer is not None)
        observe(self, outcome)

    monkeypatch.setattr(PromptLookup, "observe", noted)
    prompt = torch.arange(5, 15).repeat(3)[None]
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": -1, "prompt_lookup_num_tokens": 6}
    tiny_qwen3.generate(prompt, assistant_model=tiny_drafter, **options)
    assert sum(seen) == tiny_drafter.stats.num_lookups > 0

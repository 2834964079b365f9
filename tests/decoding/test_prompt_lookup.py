"""Rounds that copy from the text in place of drafting: no text changes, and they are worth their time."""

import copy
import pickle
import threading

import pytest
import torch
from builders import PAD, build_drafter, left_padded
from oracle import oracle, proposed
from recorded_graphs import recorded_graphs
from test_families import build
from transformers import GenerationConfig

import hf_domino
from hf_domino import LookupMemory
from hf_domino.decoding.candidate_generator import DominoCandidateGenerator
from hf_domino.decoding.policy import LOOKUP
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.prompt_lookup import PromptLookup
from hf_domino.decoding.round import Arm, Outcome, Plan

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
            lookup.observe(offer, [min(num_accepted, offer.length) + 1])
            offer = lookup.offer(prefixes, 10, PRICE) or offer
        assert (offer.expected > first.expected) == (num_accepted > 0)
        assert offer.expected > 8 if num_accepted else offer.expected < 1.1


@pytest.mark.parametrize("is_copied", [False, True])
def test_what_is_drafted_teaches_nothing_of_copies(tiny_qwen3, make_drafter, is_copied):
    generator = DominoCandidateGenerator(make_drafter(tiny_qwen3), tiny_qwen3, GenerationConfig(**COPYING))
    tokens = [*PASSAGE, 5, *PASSAGE[:4]]
    generator.lookup.read = lambda row, start: tokens[start:]
    prefixes = Prefixes.of(torch.tensor([tokens]))
    first = offer = generator.lookup.offer(prefixes, 10, PRICE)
    for _ in range(10):
        plan = Plan(LOOKUP, offer.length, offer) if is_copied else Plan(Arm(4), 4)
        generator.observe_round(Outcome(plan, [0], plan.length, [1]), 0.1)
        offer = generator.lookup.offer(prefixes, 10, PRICE) or offer
    assert (offer.expected == first.expected) == (not is_copied)


@pytest.mark.parametrize(
    ("wanted", "fields", "lengths"),
    [
        (10, {}, {1, 2, 4, 6}),
        (3, {}, {1, 2}),
        (40, {"draft_tree_size": 16}, {1, 2, 4, 8, 16}),
        (40, {"draft_tree_size": 20, "draft_window_size": 4}, {1, 2, 4, 8, 16, 20}),
    ],
)
def test_copies_of_fixed_shape_have_one_of_a_few_lengths(tiny_qwen3, make_drafter, wanted, fields, lengths):
    drafter = make_drafter(tiny_qwen3, **fields)
    options = GREEDY | {"prompt_lookup_num_tokens": wanted, "cache_implementation": "static"}
    with recorded_graphs():
        text = generate(tiny_qwen3, PROMPT, assistant_model=drafter, **options)
    assert text == generate(tiny_qwen3, PROMPT, **GREEDY)
    rounds = zip(drafter.stats.proposed[0], drafter.stats.looked_up[0], strict=True)
    found = {count for count, is_lookup in rounds if is_lookup}
    assert found
    assert found <= lengths
    if fields:  # longer than a block
        assert max(found) > drafter.config.num_draft_tokens


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
        options = options | {"max_new_tokens": target.config.max_position_embeddings - PROMPT.shape[1] - left}
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

    def noted(self, offer, num_emitted):
        seen.append(offer)
        observe(self, offer, num_emitted)

    monkeypatch.setattr(PromptLookup, "observe", noted)
    prompt = torch.arange(5, 15).repeat(3)[None]
    options = {"do_sample": False, "max_new_tokens": 30, "eos_token_id": -1, "prompt_lookup_num_tokens": 6}
    tiny_qwen3.generate(prompt, assistant_model=tiny_drafter, **options)
    assert len(seen) == tiny_drafter.stats.num_lookups > 0


# --- votes and the texts of others ------------------------------------------------------------------------------------


def offer_after(texts, tokens, most=10):
    """What is offered after the last tokens of a text if the memory holds these texts."""
    memory = LookupMemory()
    for text in texts:
        memory.add(text)
    lookup, prefixes = lookup_in(tokens, most, memory=memory)
    return lookup.offer(prefixes, most, PRICE)


def test_the_continuation_that_most_matches_agree_on_is_proposed():
    texts = [[10, 41, 42, 1, 2], [11, 41, 42, 1, 3, 4], [12, 41, 42, 5], [13, 41, 42, 1, 3, 4]]
    assert offer_after(texts, [41, 42]).tokens[0][:3] == [1, 3, 4]
    assert offer_after(texts[:1] + texts[2:3], [41, 42]).tokens[0][0] in (1, 5)


def test_a_longer_match_outweighs_shorter_ones_that_do_not_agree_with_it():
    few = [[10, 41, 42, 5], [11, 41, 42, 6]]
    assert offer_after([[9, *PASSAGE, 41, 42, 1], *few], [*PASSAGE, 41, 42]).tokens[0][0] == 1


def test_many_that_agree_outweigh_a_single_match_that_is_hardly_longer():
    many = [[50 + place, 41, 42, 5] for place in range(6)]
    assert offer_after([[9, 40, 41, 42, 1], *many], [40, 41, 42]).tokens[0][0] == 5


def test_agreement_is_promised_more():
    """The promise is the share of matches that go on in this way, and how many there are."""
    texts = [[10 + place, 41, 42, 1] for place in range(6)]
    expected = [offer_after(texts[:count], [41, 42], most=1).expected for count in (1, 2, 3)]
    assert expected == sorted(set(expected))
    split = [[20 + place, 41, 42, 2 + place] for place in range(6)]
    assert offer_after(texts[:3] + split, [41, 42], most=1).expected < expected[0] + 0.05


def test_sequences_of_a_batch_read_each_other():
    texts = [[5, 6, *PASSAGE, 40], [7, *PASSAGE[:6]], [50, 51, 52]]
    lookup = PromptLookup(10, 64)
    lookup.read = lambda row, start: texts[row][start:]
    ids, _ = left_padded([torch.tensor(text) for text in texts])
    offer = lookup.offer(Prefixes(ids, [len(text) for text in texts], [0, 1, 2]), 10, PRICE)
    assert offer.tokens[1][:2] == PASSAGE[6:8]
    texts[0] += [41, 42, 43]
    texts[2] += [40, 41]
    offer = lookup.offer(Prefixes(ids, [len(text) for text in texts], [0, 1, 2]), 10, PRICE)
    assert offer.tokens[2][0] == 42, "what the first sequence has just written"


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["domino", "recycling"])
def test_later_calls_look_up_in_earlier_ones(tiny_qwen3, make_drafter, options, method, forward_clock):
    prompt = torch.tensor([[33, 9, 45, 12, 60, 8, 21, 30]])
    plain = generate(tiny_qwen3, prompt, **options)
    drafter = hf_domino.recycling(tiny_qwen3) if method == "recycling" else make_drafter(tiny_qwen3)
    drafter.memory = LookupMemory()
    lengths = []
    for _ in range(3):
        assert generate(tiny_qwen3, prompt, assistant_model=drafter, **options) == plain
        lengths.append(len(drafter.stats.rows[0]))
    assert drafter.stats.lookup_length > 3
    assert lengths[2] < lengths[0]
    assert len(drafter.memory) == 8 + 36 + 2 * 35, "the prompt and the first token are held once"


def test_nothing_is_kept_without_a_memory(tiny_qwen3, make_drafter):
    drafter, prompt = make_drafter(tiny_qwen3), torch.tensor([[33, 9, 45]])
    rounds = []
    for _ in range(2):
        generate(tiny_qwen3, prompt, assistant_model=drafter, **GREEDY, **COPYING)
        rounds.append((drafter.stats.num_lookups, drafter.stats.rows))
    assert rounds[0] == rounds[1]
    assert drafter.memory is None


def test_a_memory_holds_texts_without_padding(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3)
    drafter.memory = LookupMemory()
    ids, mask = left_padded([PROMPT[0], torch.tensor([7, 8, 9])], PAD)
    inputs = {"attention_mask": mask, "pad_token_id": PAD}
    generate(tiny_qwen3, ids, assistant_model=drafter, **inputs, **GREEDY)
    assert len(drafter.memory) == PROMPT.shape[1] + 3 + 2 * 36


def test_the_last_tokens_of_every_sequence_are_kept(tiny_qwen3, make_drafter):
    """Also of those that end first, and of a text that ends without a round."""
    drafter = make_drafter(tiny_qwen3)
    drafter.memory = LookupMemory()
    rows = [PROMPT[0], PROMPT[0].flip(0)]
    plain = tiny_qwen3.generate(torch.stack(rows), **GREEDY)
    end = int(plain[0, PROMPT.shape[1] + 4])
    options = GREEDY | {"eos_token_id": end, "pad_token_id": PAD}
    ids = torch.stack(rows)
    output = tiny_qwen3.generate(ids, assistant_model=drafter, **options)
    texts = [
        row[: 1 + min([i for i, t in enumerate(row) if i >= 27 and t == end], default=len(row))]
        for row in output.tolist()
    ]
    before = len(drafter.memory)
    assert before == sum(map(len, texts))
    for text in texts:
        drafter.memory.add(text)
    assert len(drafter.memory) == before
    generate(tiny_qwen3, torch.tensor([[5, 6, 7]]), assistant_model=drafter, **GREEDY | {"max_new_tokens": 1})
    assert len(drafter.memory) == before + 4


def test_views_share_the_memory_and_copies_have_none(tiny_qwen3, make_drafter, tmp_path):
    """A copy or a file that is passed on must not hold what users wrote."""
    drafter = make_drafter(tiny_qwen3)
    drafter.memory = LookupMemory()
    drafter.memory.add(PASSAGE)
    assert drafter.view(draft_length="adaptive").memory is drafter.memory
    torch.save(drafter, tmp_path / "drafter.pt")
    saved = torch.load(tmp_path / "drafter.pt", weights_only=False)
    for other in (copy.deepcopy(drafter), pickle.loads(pickle.dumps(drafter)), saved):
        assert other.memory is None
        assert torch.equal(other.fc.weight, drafter.fc.weight)
    assert len(drafter.memory) == len(PASSAGE)


def test_a_memory_is_not_saved_with_the_drafter(tiny_qwen3, make_drafter, tmp_path):
    drafter = make_drafter(tiny_qwen3)
    drafter.memory = LookupMemory()
    drafter.save_pretrained(tmp_path)
    assert hf_domino.DominoDraftModel.from_pretrained(tmp_path).memory is None


@pytest.mark.parametrize("memory", ["texts.safetensors", [1, 2], True])
def test_what_is_no_memory_is_rejected(tiny_qwen3, make_drafter, memory):
    drafter = make_drafter(tiny_qwen3)
    drafter.memory = memory
    with pytest.raises(ValueError, match=r"drafter.memory must be a LookupMemory or None, got .*LookupMemory.load"):
        generate(tiny_qwen3, PROMPT, assistant_model=drafter, **GREEDY)


def test_an_interrupted_call_has_stored_what_it_wrote(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3)
    drafter.memory = LookupMemory()

    def stop(ids, scores):
        if ids.shape[1] == PROMPT.shape[1] + 9:
            raise KeyboardInterrupt
        return torch.zeros(len(ids), dtype=torch.bool)

    with pytest.raises(KeyboardInterrupt):
        generate(tiny_qwen3, PROMPT, assistant_model=drafter, stopping_criteria=[stop], **GREEDY)
    assert PROMPT.shape[1] < len(drafter.memory) <= PROMPT.shape[1] + 9


def test_a_memory_may_be_cleared_and_shared_while_texts_are_written(tiny_qwen3, make_drafter):
    plain = [generate(tiny_qwen3, PROMPT + shift, **GREEDY) for shift in range(3)]
    drafter = make_drafter(tiny_qwen3)
    drafter.memory = LookupMemory(max_tokens=100)  # smaller than the texts
    found = {}

    def write(shift):
        found[shift] = generate(tiny_qwen3, PROMPT + shift, assistant_model=drafter, **GREEDY)

    threads = [threading.Thread(target=write, args=(shift,)) for shift in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        drafter.memory.clear()
    for thread in threads:
        thread.join()
    assert [found[shift] for shift in range(3)] == plain

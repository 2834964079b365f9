"""Batches: every row is the target's own whatever the others do, under every feature of `generate`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from builders import SEED, left_padded
from oracle import oracle
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.output import CommittedSequences
from hf_domino.decoding.stopping import KnownStops

LENGTHS = [5, 20, 9, 1]
NEW_TOKENS = 32
PAD = 2


@pytest.fixture(scope="module")
def prompts():
    torch.manual_seed(3)
    ids, mask = left_padded([torch.randint(4, 64, (length,)) for length in LENGTHS], PAD)
    return {"input_ids": ids, "attention_mask": mask}


def both(target, drafter, prompts, accuracy=0.7, **options):
    """Plain output and assisted output, with an oracle that lets rows accept different numbers of drafts."""
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS} | options
    plain = target.generate(**prompts, **options)
    needs_end_of_text = ("stop_strings", "tokenizer", "exponential_decay_length_penalty")
    truth = {name: value for name, value in options.items() if name not in needs_end_of_text}
    with oracle(target, prompts["input_ids"], accuracy, attention_mask=prompts["attention_mask"], **truth):
        return plain, target.generate(**prompts, assistant_model=drafter, **options)


def eos_that_ends_rows_apart(target, prompts, **options):
    """A token that plain greedy text reaches at different places in at least two rows."""
    text = target.generate(**prompts, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1)
    new = text[:, prompts["input_ids"].shape[1] :]
    for token in new.unique().tolist():
        firsts = {row.tolist().index(token) for row in new if token in row.tolist()}
        if len(firsts) > 1:
            return token
    raise AssertionError("no such token")


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("projector_type", ["domino", "dflash"])
def test_greedy(tiny_qwen3, make_drafter, prompts, accuracy, projector_type):
    drafter = make_drafter(tiny_qwen3, projector_type=projector_type)
    plain, assisted = both(tiny_qwen3, drafter, prompts, accuracy, eos_token_id=-1)
    assert torch.equal(assisted, plain)
    assert len(drafter.stats.acceptance_lengths) == len(LENGTHS)


def test_rows_end_by_themselves(tiny_qwen3, tiny_drafter, prompts):
    eos = eos_that_ends_rows_apart(tiny_qwen3, prompts)
    plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, eos_token_id=eos)
    assert torch.equal(assisted, plain)
    assert (plain[:, -1] == PAD).any()
    rounds = [len(row) for row in tiny_drafter.stats.rows]
    assert min(rounds) < max(rounds)  # a finished row is not decoded any further


def test_rows_without_end_of_text_go_on(tiny_qwen3, tiny_drafter, prompts, tiny_tokenizer):
    """Plain generation pads a stopped row only if an end-of-text token is known."""
    text = tiny_qwen3.generate(**prompts, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    new = text[0, prompts["input_ids"].shape[1] :]
    stop = {"stop_strings": [tiny_tokenizer.decode(new[4:5]), tiny_tokenizer.decode(text[1, -6:-4])]}
    config = tiny_qwen3.generation_config.eos_token_id
    tiny_qwen3.generation_config.eos_token_id = None
    try:
        plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, tokenizer=tiny_tokenizer, **stop)
    finally:
        tiny_qwen3.generation_config.eos_token_id = config
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[9], [11, 12]]},
        {"min_new_tokens": 20},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9},
        {"encoder_repetition_penalty": 1.3},
        {"encoder_no_repeat_ngram_size": 1},
        {"suppress_tokens": [8, 9, 10], "begin_suppress_tokens": [12]},
        {"forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": (4, 1.2)},
        {"sequence_bias": {(9,): 4.0}},
    ],
    ids=lambda options: " ".join(options),
)
def test_processors_see_each_rows_own_prefix(tiny_qwen3, tiny_drafter, prompts, options):
    plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, **options)
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize(
    "options",
    [
        {"encoder_repetition_penalty": 1.3},
        {"encoder_no_repeat_ngram_size": 1},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(4 + 10 * row, 24 + 10 * row))},
    ],
    ids=lambda options: " ".join(options),
)
def test_rows_keep_their_own_prompts_when_the_first_has_ended(tiny_qwen3, tiny_drafter, prompts, options):
    unending = tiny_qwen3.generate(**prompts, do_sample=False, max_new_tokens=8, eos_token_id=-1, **options)
    eos = unending[0, max(LENGTHS) + 3].item()
    plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, eos_token_id=eos, **options)
    assert plain[0, -1] == PAD != plain[-1, max(LENGTHS) + 8]
    assert torch.equal(assisted, plain)


def test_prefix_constraints_know_their_row(tiny_qwen3, tiny_drafter, prompts):
    def allowed(batch_id, ids):
        start = 4 + 10 * batch_id
        return list(range(start, start + 10)) if int(ids[-1]) % 3 else list(range(4, 60))

    plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(assisted, plain)
    assert tiny_drafter.stats.acceptance_length > 1.5


def test_prefix_constraints_of_several_sequences_know_what_plain_tells_them(tiny_qwen3, tiny_drafter, prompts):
    """The prompt's index in newer releases of Transformers, the sequence's in older ones."""
    asked = {}

    def allowed(index, ids):
        asked.setdefault(index, None)
        return list(range(4 + 5 * index, 10 + 5 * index))

    texts = []
    for assistant in (None, tiny_drafter):
        torch.manual_seed(0)
        options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12, "eos_token_id": -1}
        asked.clear()
        text = tiny_qwen3.generate(**prompts, prefix_allowed_tokens_fn=allowed, assistant_model=assistant, **options)
        texts.append((text.tolist(), sorted(asked)))
    assert texts[1] == texts[0]


def test_top_h_in_a_batch(tiny_qwen3, tiny_drafter, prompts):
    texts = []
    for assistant in (None, tiny_drafter):
        torch.manual_seed(0)
        options = {"do_sample": True, "top_h": 0.7, "max_new_tokens": 20, "eos_token_id": -1}
        texts.append(tiny_qwen3.generate(**prompts, assistant_model=assistant, **options))
    assert torch.equal(*texts)


class Record(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ended = True


def test_streams_like_plain_generation(tiny_qwen3, tiny_drafter, prompts):
    eos, streams = eos_that_ends_rows_apart(tiny_qwen3, prompts), []
    for assistant in (None, tiny_drafter):
        streams.append(Record())
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "streamer": streams[-1]}
        tiny_qwen3.generate(**prompts, assistant_model=assistant, **options)
    assert streams[1].values == streams[0].values
    assert streams[1].ended


def test_the_stream_does_not_wait_for_a_row_that_has_ended(tiny_qwen3, tiny_drafter, prompts):
    eos, stream, counts = eos_that_ends_rows_apart(tiny_qwen3, prompts), Record(), []
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "streamer": stream}
    handle = tiny_qwen3.register_forward_pre_hook(lambda *_: counts.append(len(stream.values)))
    try:
        tiny_qwen3.generate(**prompts, assistant_model=tiny_drafter, **options)
    finally:
        handle.remove()
    first_padded = next(place for place, values in enumerate(stream.values) if place and PAD in values)
    assert counts[-1] > first_padded + 1  # before the last forward


@pytest.mark.parametrize("is_uneven", [False, True])
def test_return_dict(tiny_qwen3, tiny_drafter, prompts, is_uneven):
    """Behind a row's end plain generation has logits of padding; here there are none."""
    eos = eos_that_ends_rows_apart(tiny_qwen3, prompts) if is_uneven else -1
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": eos}
    plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, **options)
    assert torch.equal(assisted.sequences, plain.sequences)
    ends = (plain.sequences[:, prompts["input_ids"].shape[1] :] == eos).long()
    is_behind = (ends.cumsum(dim=1) - ends).T.bool()
    assert is_behind.any() == is_uneven
    for name in ("scores", "logits"):
        ours, theirs = torch.stack(getattr(assisted, name)), torch.stack(getattr(plain, name))
        torch.testing.assert_close(ours[~is_behind], theirs[~is_behind], atol=1e-4, rtol=1e-4)
        assert ours[is_behind].isnan().all()


def test_several_sequences_of_one_prompt(tiny_qwen3, tiny_drafter, prompts):
    options = {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 5, "assistant_model": tiny_drafter}
    sequences = tiny_qwen3.generate(**prompts, **options)
    assert sequences.shape[0] == 5 * len(LENGTHS)
    assert torch.equal(sequences[::5, : max(LENGTHS)], prompts["input_ids"])
    assert len({tuple(row) for row in sequences[:5].tolist()}) > 1


class Counting(LogitsProcessor):
    """Keeps state: forbids a token after every seventh call."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores = scores.clone()
        if len(self.seen) % 7 == 0:
            scores[:, scores.argmax(dim=-1)] = -torch.inf
        return scores


@pytest.mark.parametrize("accuracy", [0.0, 0.8])
def test_a_processor_with_state_sees_committed_positions_only(tiny_qwen3, tiny_drafter, prompts, accuracy):
    prompt = {name: value[1:2] for name, value in prompts.items()}
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": -1}
    plain, assisted = Counting(), Counting()
    expected = tiny_qwen3.generate(**prompt, logits_processor=[plain], **options)
    with oracle(tiny_qwen3, prompt["input_ids"], accuracy, **options):
        text = tiny_qwen3.generate(**prompt, logits_processor=[assisted], assistant_model=tiny_drafter, **options)
    assert torch.equal(text, expected)
    assert assisted.seen == plain.seen


def test_a_processor_with_state_is_refused_in_a_batch(tiny_qwen3, tiny_drafter, prompts):
    with pytest.raises(ValueError, match=r"logits_processor .* keep no state.*'Counting'.*one at a time"):
        tiny_qwen3.generate(**prompts, logits_processor=[Counting()], assistant_model=tiny_drafter, max_new_tokens=3)


def test_a_filled_cache_is_refused_in_a_batch(tiny_qwen3, tiny_drafter, prompts):
    first = tiny_qwen3.generate(**prompts, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=rf"{CACHE} must be empty, for a batch, got '21 positions'"):
        tiny_qwen3.generate(first.sequences, past_key_values=first.past_key_values, assistant_model=tiny_drafter)


def test_an_empty_cache_is_left(tiny_qwen3, tiny_drafter, prompts):
    """Rows left it at different times: going on from it must not be wrong."""
    cache, options = DynamicCache(config=tiny_qwen3.config), {"do_sample": False, "max_new_tokens": 8}
    first = tiny_qwen3.generate(**prompts, past_key_values=cache, assistant_model=tiny_drafter, **options)
    mask = torch.nn.functional.pad(
        prompts["attention_mask"], (0, first.shape[1] - prompts["input_ids"].shape[1]), value=1
    )
    assert cache.get_seq_length() == 0
    again = tiny_qwen3.generate(first, attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(again, tiny_qwen3.generate(first, attention_mask=mask, **options))


def test_positions_of_one_row_serve_all(tiny_qwen3, tiny_drafter):
    ids = torch.randint(4, 64, (3, 9))
    options = {"do_sample": False, "max_new_tokens": 20, "position_ids": torch.arange(5, 14)[None]}
    with oracle(tiny_qwen3, ids, 0.6, **options):
        assisted = tiny_qwen3.generate(ids, assistant_model=tiny_drafter, **options)
    assert torch.equal(assisted, tiny_qwen3.generate(ids, **options))


def test_steps_are_those_of_the_longest_row():
    """A call that is broken off gives no number again that any of its rows was drawn with."""
    known, nothing = KnownStops(max_length=20), torch.empty(0)
    committed = CommittedSequences(torch.zeros(2, 3).long(), StoppingCriteriaList(), GenerationConfig(), None, known)
    committed.commit([0, 1], torch.ones(2, 4).long(), [4, 1], nothing, nothing)
    assert committed.unfinished == [0, 1]
    assert committed.num_steps == 4
    assert [committed.tokens(0, start) for start in (1, 3, 5)] == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1], [1, 1]]


class OwnCriterion(StoppingCriteria):
    """Of a caller: remembers what it was asked, and says what another function says of it."""

    def __init__(self, says):
        self.says, self.asked = says, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids.tolist(), None if scores is None else len(scores)))
        return self.says(self, input_ids)


def each(criterion, ids):
    return ids[:, -1] < 9


def all_when_any(criterion, ids):
    return (ids[:, -1] < 6).any().expand(len(ids))


def once_all_were(criterion, ids):
    """As lm-evaluation-harness does: by what it saw before, for all rows at once, and of as many as it was made for."""
    criterion.done = getattr(criterion, "done", [False] * 4)
    for row, was_done in enumerate(criterion.done):
        criterion.done[row] = was_done or bool(ids[row, -1] < 20)
    return all(criterion.done)


def never(criterion, ids):
    return False


@pytest.mark.parametrize("says", [each, all_when_any, once_all_were, never])
@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("do_sample", [True, False])
def test_criteria_of_ones_own(tiny_qwen3, tiny_drafter, prompts, says, has_end, do_sample):
    """They may compare rows, count calls or keep state: each is asked what plain generation asks it, and no more."""
    options = {"do_sample": do_sample, "max_new_tokens": NEW_TOKENS, "attention_mask": prompts["attention_mask"]}
    truth = oracle(tiny_qwen3, prompts["input_ids"], 0.7, **options)  # with the noise of the calls
    options |= {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": PAD}
    options["eos_token_id"] = eos_that_ends_rows_apart(tiny_qwen3, prompts) if has_end else None
    found = []
    for drafter, drafts in ((None, contextlib.nullcontext()), (tiny_drafter, truth)):
        criterion, streamer = OwnCriterion(says), Record()
        options |= {"stopping_criteria": StoppingCriteriaList([criterion]), "streamer": streamer}
        torch.manual_seed(SEED)
        with drafts:
            torch.manual_seed(SEED)
            output = tiny_qwen3.generate(prompts["input_ids"], assistant_model=drafter, **options)
        noise = torch.rand(()).item()
        found.append((output.sequences.tolist(), criterion.asked, streamer.values, len(output.scores), noise))
    assert found[1] == found[0]
    if says is never:
        assert tiny_drafter.stats.acceptance_length > 1.2


@pytest.mark.parametrize(("num_rows", "num_new"), [(1, 3), (4, 8)])
def test_nothing_behind_the_end_of_texts_without_an_end_token_counts(target, make_drafter, prompts, num_rows, num_new):
    """Neither in the cache, which goes on where the text does, nor in the statistics."""
    rows = {name: tensor[:num_rows] for name, tensor in prompts.items()}
    criterion = OwnCriterion(lambda _, ids: ids.shape[1] == 20 + num_new)
    options = {"stopping_criteria": StoppingCriteriaList([criterion]), "return_dict_in_generate": True}
    drafter = make_drafter(target)
    plain, assisted = both(target, drafter, rows, 0.9, pad_token_id=PAD, **options)
    assert torch.equal(assisted.sequences, plain.sequences)
    assert drafter.stats.num_new_tokens == num_rows * num_new
    if num_rows == 1:
        assert assisted[CACHE].get_seq_length() == plain[CACHE].get_seq_length()


def test_refusals(tiny_qwen3, tiny_drafter, prompts):
    call = {**prompts, "assistant_model": tiny_drafter, "max_new_tokens": 4}
    with pytest.raises(
        ValueError, match=r"EncoderRepetitionPenaltyLogitsProcessor must be 8, got 4. Repeat the prompts"
    ):
        tiny_qwen3.generate(**call, do_sample=True, num_return_sequences=2, encoder_repetition_penalty=1.3)

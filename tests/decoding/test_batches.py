"""Batches: every row is the target's own whatever the others do, under every feature of `generate`."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
from builders import SEED, left_padded
from oracle import oracle
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_domino._common.cache_name import CACHE

pytestmark = pytest.mark.transformers

LENGTHS = [5, 20, 9, 1]
NEW_TOKENS = 24
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


@pytest.fixture(scope="module")
def eos(tiny_qwen3, prompts):
    """A token that plain greedy text reaches at different places in at least two rows."""
    text = tiny_qwen3.generate(**prompts, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1)
    new = text[:, prompts["input_ids"].shape[1] :]
    firsts = {token: {row.tolist().index(token) for row in new if token in row} for token in new.unique().tolist()}
    return next(token for token, places in firsts.items() if len(places) > 1)


@pytest.mark.parametrize(
    ("projector_type", "accuracy"), [("domino", 0.0), ("domino", 0.9), ("dflash", 0.5), ("dflash", 1.0)]
)
def test_greedy(tiny_qwen3, make_drafter, prompts, accuracy, projector_type):
    drafter = make_drafter(tiny_qwen3, projector_type=projector_type)
    plain, assisted = both(tiny_qwen3, drafter, prompts, accuracy, eos_token_id=-1)
    assert torch.equal(assisted, plain)
    assert len(drafter.stats.acceptance_lengths) == len(LENGTHS)


def test_the_longest_row_ends_with_its_first_token(tiny_qwen3, make_drafter, prompts):
    """What it took up in the cache is cut away before the first round of the others."""
    text = tiny_qwen3.generate(**prompts, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1)
    longest, start = LENGTHS.index(max(LENGTHS)), prompts["input_ids"].shape[1]
    first = int(text[longest, start])
    others = [row for row in range(len(LENGTHS)) if first not in text[row, start:]]
    for kept in ([longest, *others], [longest, others[0]]):
        some = {name: values[kept] for name, values in prompts.items()}
        plain, assisted = both(tiny_qwen3, make_drafter(tiny_qwen3), some, 0.5, eos_token_id=first)
        assert torch.equal(assisted, plain)


def test_rows_end_by_themselves(tiny_qwen3, tiny_drafter, prompts, eos):
    plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, eos_token_id=eos)
    assert torch.equal(assisted, plain)
    assert (plain[:, -1] == PAD).any()
    rounds = [len(row) for row in tiny_drafter.stats.rows]
    assert min(rounds) < max(rounds)  # a finished row is not decoded any further


def test_rows_without_end_of_text_go_on(target, make_drafter, prompts, tiny_tokenizer):
    """Plain generation pads a stopped row only if an end-of-text token is known."""
    text = target.generate(**prompts, do_sample=False, max_new_tokens=NEW_TOKENS)
    words = [text[0, max(LENGTHS) + 4 : max(LENGTHS) + 5], text[1, -6:-4]]
    stop = {"stop_strings": [tiny_tokenizer.decode(word) for word in words]}
    plain, assisted = both(target, make_drafter(target), prompts, tokenizer=tiny_tokenizer, **stop)
    assert torch.equal(assisted, plain)


def of_row(row, ids):
    """What a row, or a sequence, may say: the prompt's index in newer releases of Transformers."""
    return list(range(4 + 10 * row, 24 + 10 * row))


@pytest.mark.parametrize(
    "options",
    [
        {"bad_words_ids": [[9], [11, 12]]},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 9},
        {"suppress_tokens": [8, 9, 10], "begin_suppress_tokens": [12], "sequence_bias": {(9,): 4.0}},
        {"forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": (4, 1.2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_see_each_rows_own_prefix(tiny_qwen3, tiny_drafter, prompts, options):
    plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, **options)
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize(
    "options",
    [{"encoder_repetition_penalty": 1.3}, {"encoder_no_repeat_ngram_size": 1}, {"prefix_allowed_tokens_fn": of_row}],
    ids=lambda options: next(iter(options)),
)
def test_rows_keep_their_own_prompts_when_the_first_has_ended(tiny_qwen3, tiny_drafter, prompts, options):
    unending = tiny_qwen3.generate(**prompts, do_sample=False, max_new_tokens=8, eos_token_id=-1, **options)
    end = unending[0, max(LENGTHS) + 3].item()
    plain, assisted = both(tiny_qwen3, tiny_drafter, prompts, eos_token_id=end, **options)
    assert plain[0, -1] == PAD != plain[-1, max(LENGTHS) + 8]
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize("options", [{"top_h": 0.7}, {"num_return_sequences": 2, "prefix_allowed_tokens_fn": of_row}])
def test_drawn(tiny_qwen3, tiny_drafter, prompts, options):
    texts, prompts = [], {name: tensor[:2] for name, tensor in prompts.items()}
    for assistant in (None, tiny_drafter):
        torch.manual_seed(0)
        call = {"do_sample": True, "max_new_tokens": 20, "eos_token_id": -1, "assistant_model": assistant}
        texts.append(tiny_qwen3.generate(**prompts, **call, **options))
    assert torch.equal(*texts)


class Record(BaseStreamer):
    def __init__(self):
        self.values = []

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.values.append("end")


def test_the_stream_does_not_wait_for_a_row_that_has_ended(tiny_qwen3, tiny_drafter, prompts, eos):
    stream, counts = Record(), []
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": eos, "streamer": stream}
    handle = tiny_qwen3.register_forward_pre_hook(lambda *_: counts.append(len(stream.values)))
    try:
        tiny_qwen3.generate(**prompts, assistant_model=tiny_drafter, **options)
    finally:
        handle.remove()
    first_padded = next(place for place, values in enumerate(stream.values) if place and PAD in values)
    assert counts[-1] > first_padded + 1  # before the last forward


@pytest.mark.parametrize("is_uneven", [False, True])
def test_return_dict(tiny_qwen3, tiny_drafter, prompts, eos, is_uneven):
    """Behind a row's end plain generation has logits of padding; here there are none."""
    eos = eos if is_uneven else -1
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


def test_an_empty_cache_is_left(tiny_qwen3, tiny_drafter, prompts):
    """Rows left it at different times: going on from it must not be wrong."""
    cache, options = DynamicCache(config=tiny_qwen3.config), {"do_sample": False, "max_new_tokens": 8}
    first = tiny_qwen3.generate(**prompts, past_key_values=cache, assistant_model=tiny_drafter, **options)
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, first.shape[1] - max(LENGTHS)), value=1)
    assert cache.get_seq_length() == 0
    again = tiny_qwen3.generate(first, attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(again, tiny_qwen3.generate(first, attention_mask=mask, **options))


def test_positions_of_one_row_serve_all(tiny_qwen3, tiny_drafter):
    ids = torch.randint(4, 64, (3, 9))
    options = {"do_sample": False, "max_new_tokens": 20, "position_ids": torch.arange(5, 14)[None]}
    with oracle(tiny_qwen3, ids, 0.6, **options):
        assisted = tiny_qwen3.generate(ids, assistant_model=tiny_drafter, **options)
    assert torch.equal(assisted, tiny_qwen3.generate(ids, **options))


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


@pytest.mark.parametrize(
    ("says", "has_end", "do_sample"),
    [
        (*case, index % 3 > 0)
        for index, case in enumerate(itertools.product([each, all_when_any, once_all_were, never], [True, False]))
    ],
)
def test_criteria_of_ones_own(tiny_qwen3, tiny_drafter, prompts, eos, says, has_end, do_sample):
    """They may compare rows, count calls or keep state: each is asked what plain generation asks it, and no more."""
    options = {"do_sample": do_sample, "max_new_tokens": NEW_TOKENS, "attention_mask": prompts["attention_mask"]}
    truth = oracle(tiny_qwen3, prompts["input_ids"], 0.7, **options)  # with the noise of the calls
    options |= {"return_dict_in_generate": True, "output_scores": True, "pad_token_id": PAD}
    options["eos_token_id"] = eos if has_end else None
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
    with pytest.raises(ValueError, match=r"logits_processor .* keep no state.*'function'"):
        tiny_qwen3.generate(**call, logits_processor=[lambda ids, scores: scores])
    with pytest.raises(ValueError, match="must be 8, got 4"):
        tiny_qwen3.generate(**call, do_sample=True, num_return_sequences=2, encoder_repetition_penalty=1.3)
    filled = tiny_qwen3.generate(**prompts, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)[CACHE]
    with pytest.raises(ValueError, match=f"{CACHE} must be empty, for a batch, got '21 positions'"):
        tiny_qwen3.generate(**call, **{CACHE: filled})

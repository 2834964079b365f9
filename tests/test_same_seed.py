"""The same seed writes the same text: sampled output is plain `generate`'s, token for token, whatever the drafter."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import logging
import threading

import pytest
import torch
from builders import VOCAB_SIZE, build_drafter, left_padded
from method_table import EVERY, RECYCLING
from oracle import faults
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_domino.decoding import loop
from hf_domino.decoding import noise as noise_module
from hf_domino.decoding.noise import StepNoise
from hf_domino.decoding.static.workspace import release_workspaces

pytestmark = pytest.mark.transformers

SEED, NEW_TOKENS = 11, 32  # a round of every length
SCORES_TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}  # a rounding to fp32: a block is verified by other sums than a step
PLAIN_ONLY = ("cache_implementation",)  # a fixed cache is asked for beside a drafter only

LAWS = {
    "T 0.7": {"temperature": 0.7, "top_k": 0},
    "T 1.0": {"top_k": 0},
    "top-k": {"top_k": 8},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "min-p": {"min_p": 0.05, "top_k": 0},
    "typical": {"typical_p": 0.8, "top_k": 0},
    "penalty": {"repetition_penalty": 1.3, "temperature": 0.8},
    "min new tokens": {"min_new_tokens": 9},
    "bad words": {"bad_words_ids": [[9], [11, 12]], "no_repeat_ngram_size": 3},
}
LENGTHS = (5, 17, 9, 1, 2, 9, 12, 3)
PROMPTS = [torch.arange(start, start + length) for start, length in zip(range(5, 29, 3), LENGTHS, strict=True)]
BATCHES = {1: PROMPTS[:1], 3: [torch.arange(start, start + 7) for start in (5, 20, 40)], 8: PROMPTS}
DRAFTERS = {
    "pool 16": {},
    "pool 1": {"draft_pool_size": 1},
    "all tokens": {"draft_pool_size": None},
    "adaptive": {"draft_length": "adaptive"},
    "adaptive, all tokens": {"draft_length": "adaptive", "draft_pool_size": None},
    "baseline": {"projector_type": "dflash"},
    RECYCLING: {"projector_type": RECYCLING, "draft_tree_size": None},
}
DRAFTERS |= {name: fields for name, fields in EVERY.items() if not name.startswith("domino")}
OTHERS = tuple(name for name in DRAFTERS if name in {*EVERY, RECYCLING})
ENDS = {"full": {"eos_token_id": -1}, "early": {"eos_token_id": list(range(1, 7))}}
FEATURES = {
    "several sequences": (1, {"num_return_sequences": 3}),
    "one token": (3, {"max_new_tokens": 1}),
    "two tokens": (1, {"max_new_tokens": 2}),
    "prefill in chunks": (1, {"prefill_chunk_size": 2}),
    "fixed shapes": (1, {"cache_implementation": "static"}),
    "fixed shapes, a distribution with prefix": (1, {"cache_implementation": "static", **LAWS["penalty"]}),
}


@pytest.fixture(scope="module")
def target(tiny_qwen3):
    return copy.deepcopy(tiny_qwen3).double()


@pytest.fixture(scope="module")
def drafters(target):
    """Drafters that were built, by what they are called."""
    yield {name: build_drafter(target, **fields).double() for name, fields in DRAFTERS.items()}
    release_workspaces()


def prompt_of(batch_size):
    ids, mask = left_padded(BATCHES[batch_size], pad=2)
    return {"input_ids": ids, "attention_mask": mask}


def sample(target, prompt, options, drafter=None):
    """A text from the seed, and the default generator's state behind it."""
    torch.manual_seed(SEED)
    text = target.generate(**prompt, **options, assistant_model=drafter)
    return text, torch.get_rng_state()


def assert_same(target, drafter, prompt, **options):
    """Text and generator must be plain generation's, with the drafter's own drafts and with drafts of all lengths."""
    options = {"do_sample": True, "max_new_tokens": NEW_TOKENS} | ENDS["full"] | options
    alone = {name: value for name, value in options.items() if name not in PLAIN_ONLY}
    plain, state = sample(target, prompt, alone)
    for drafting in (contextlib.nullcontext(), faults(plain.tolist(), VOCAB_SIZE)):
        with drafting:
            text, left = sample(target, prompt, options, drafter)
        assert text.tolist() == plain.tolist()
        assert torch.equal(left, state)
    return plain


def has_every_length(drafter):
    """Whether the last call had rounds of every acceptance length."""
    lengths = {length for row in drafter.stats.rows for length in row}
    return lengths >= set(range(1, drafter.config.num_draft_tokens + 2))


def cases():
    """Every distribution, each with another batch, drafter and end."""
    batches, kinds, ends = itertools.cycle(BATCHES), itertools.cycle(DRAFTERS), itertools.cycle(("full", "early"))
    return [
        *((distribution, next(batches), next(kinds), next(ends)) for distribution in LAWS),
        ("T 1.0", 8, "adaptive", "early"),
        ("T 0.7", 8, "pool 16", "full"),
        ("top-p", 1, "adaptive, all tokens", "full"),
        ("T 1.0", 3, "baseline", "early"),
        *(("T 1.0", 3, kind, "full") for kind in ("eagle3", "recycling")),
        *(("penalty", 8, kind, "early") for kind in OTHERS),
    ]


ALL_CASES = [
    pytest.param(*case, marks=() if case in cases() else pytest.mark.slow)
    for case in itertools.product(LAWS, BATCHES, DRAFTERS, ENDS)
]


@pytest.mark.parametrize(("distribution", "batch_size", "kind", "end"), ALL_CASES)
def test_the_text_is_plain_generations(target, drafters, distribution, batch_size, kind, end):
    plain = assert_same(target, drafters[kind], prompt_of(batch_size), **LAWS[distribution], **ENDS[end])
    if end == "early" and batch_size == 8:
        assert len({tuple(row.tolist()).index(2) if 2 in row else None for row in plain[:, 17:]}) > 2
    if end == "full" and "adaptive" not in kind:
        assert has_every_length(drafters[kind])


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(target, drafters, feature):
    batch_size, options = FEATURES[feature]
    for kind in ("pool 16", *OTHERS[[*FEATURES].index(feature) % 2 :: 2]):
        if kind == "eagle3" and "cache_implementation" in options:
            continue  # refused by name
        assert_same(target, drafters[kind], prompt_of(batch_size), **options)
    if feature == "fixed shapes":
        assert_same(target, drafters["adaptive"], prompt_of(1), **options, **LAWS["top-p"])


@pytest.mark.parametrize("max_bytes", [0, 3 * 4 * VOCAB_SIZE])
def test_noise_that_is_not_kept_is_drawn_again(target, drafters, max_bytes, monkeypatch):
    monkeypatch.setattr(loop, "StepNoise", functools.partial(StepNoise, max_bytes=max_bytes))
    assert_same(target, drafters["pool 16"], prompt_of(8), **LAWS["top-k"], **ENDS["early"])


def test_rows_without_end_of_text_or_padding(target, drafters, tiny_tokenizer, monkeypatch):
    """A row that has stopped goes on until all have, and draws as plain generation lets it."""
    for name in ("eos_token_id", "pad_token_id"):
        monkeypatch.setattr(target.generation_config, name, None)
    stops = {"stop_strings": list("abcdeQRS"), "tokenizer": tiny_tokenizer, "eos_token_id": None}
    plain = assert_same(target, drafters["pool 16"], prompt_of(3), **stops)
    assert plain.shape[1] < 7 + NEW_TOKENS


class Forbidding(LogitsProcessor):
    """Keeps state: forbids the likeliest token at every third call."""

    num_calls = 0

    def __call__(self, input_ids, scores):
        self.num_calls += 1
        return scores if self.num_calls % 3 else scores.scatter(1, scores.argmax(dim=1, keepdim=True), -torch.inf)


def test_scores_and_logits(target, drafters):
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **LAWS["top-k"]}
    options = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "eos_token_id": -1, **wanted}
    plain, state = sample(target, prompt_of(1), options)
    with faults(plain.sequences.tolist(), VOCAB_SIZE):
        assisted, left = sample(target, prompt_of(1), options, drafters["pool 16"])
    assert torch.equal(assisted.sequences, plain.sequences)
    assert torch.equal(left, state)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(assisted, name), getattr(plain, name), **SCORES_TOLERANCE)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("kind", ["all tokens", "pool 16"])
def test_drafts_share_the_noise(target, drafters, cache, kind):
    """Where the distribution is almost flat the noise decides: drafts without it would be accepted once in 64 times."""
    options = {"do_sample": True, "max_new_tokens": 40, "temperature": 40.0, "top_k": 0, "cache_implementation": cache}
    sample(target, prompt_of(1), options, drafters[kind])
    assert drafters[kind].stats.acceptance_length > 4


def test_a_conversation_goes_on_as_plain_calls_do(target, drafters):
    """Seeded once: the second turn, from the cache of the first, must find the generator where plain leaves it."""
    texts, options = [], {"do_sample": True, "return_dict_in_generate": True, "eos_token_id": [1, 4, 5, 6]}
    for drafter in (None, drafters["pool 16"], drafters["adaptive"]):
        torch.manual_seed(SEED)
        options["assistant_model"], ids, cache = drafter, PROMPTS[1][None], None
        for _ in range(3):
            turn = target.generate(ids, past_key_values=cache, max_new_tokens=NEW_TOKENS, **options)
            ids, cache = torch.cat((turn.sequences, PROMPTS[0][None]), dim=1), turn.past_key_values
        texts.append((ids.tolist(), torch.get_rng_state().tolist()))
    assert texts[0] == texts[1] == texts[2]


class Interruption(Exception):
    """What breaks a call off."""


class BreakingStream(BaseStreamer):
    """Breaks off at one of the tokens; the prompt comes first."""

    def __init__(self, last):
        self.left = last

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise Interruption

    def end(self):
        pass


class BreakingCriterion(StoppingCriteria):
    """Breaks off where a text has so many new tokens, which happens while a block is committed."""

    def __init__(self, last):
        self.length = LENGTHS[0] + last

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.length:
            raise Interruption
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(("how", "batch_size"), [("streamer", 1), ("streamer", 3), ("criterion", 1)])
def test_a_call_that_breaks_off_has_drawn_what_plain_generation_would(target, drafters, how, batch_size):
    options = {"do_sample": True, "max_new_tokens": NEW_TOKENS, "eos_token_id": -1}
    truth, _ = sample(target, prompt_of(batch_size), options)
    for last in (1, 6, 7, 9, 12):
        left = []
        for drafter in (None, drafters["pool 16"]):
            breaking = {"streamer": BreakingStream(last)} if how == "streamer" else {}
            breaking |= {"stopping_criteria": [BreakingCriterion(last)]} if how == "criterion" else {}
            with faults(truth.tolist(), VOCAB_SIZE), pytest.raises(Interruption):
                sample(target, prompt_of(batch_size), options | breaking, drafter)
            left.append(torch.get_rng_state())
        assert torch.equal(*left)


@pytest.fixture
def drawn(monkeypatch):
    """All noise that was drawn, as numbers."""
    values, draw = [], torch.Tensor.exponential_

    def noting(*args, **kwargs):
        noise = draw(*args, **kwargs)
        values.append(tuple(noise.flatten().tolist()))
        return noise

    monkeypatch.setattr(torch.Tensor, "exponential_", noting)
    return values


@pytest.mark.parametrize("batch_size", [1, 8])
def test_every_step_is_drawn_once(target, drafters, drawn, batch_size):
    """And at most a block in vain."""
    options = {"do_sample": True, "max_new_tokens": NEW_TOKENS, **ENDS["early"]}
    plain, _ = sample(target, prompt_of(batch_size), options)
    with faults(plain.tolist(), VOCAB_SIZE):
        sample(target, prompt_of(batch_size), options, drafters["pool 16"])
    num_steps = plain.shape[1] - prompt_of(batch_size)["input_ids"].shape[1]
    assert num_steps <= len(drawn) <= num_steps + drafters["pool 16"].config.num_draft_tokens
    assert len(set(drawn)) == len(drawn)


class Together(BaseStreamer):
    """Lets no call go on before all have begun."""

    def __init__(self, barrier):
        self.barrier, self.num_put = barrier, 0

    def put(self, value):
        self.num_put += 1
        if self.num_put == 2:  # the prompt comes first
            self.barrier.wait()

    def end(self):
        pass


def test_threads_share_no_noise(target, drafters, drawn):
    """Of calls side by side the first to begin writes plain generation's text, and the others have other noise."""
    options, texts = {"do_sample": True, "max_new_tokens": 12, "eos_token_id": -1, **LAWS["T 1.0"]}, []
    plain, state = sample(target, prompt_of(1), options)
    torch.manual_seed(SEED)
    barrier = threading.Barrier(8, timeout=60)

    def call():
        streamer = Together(barrier)
        texts.append(target.generate(**prompt_of(1), **options, assistant_model=drafters["pool 16"], streamer=streamer))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn) == len(set(drawn)) == 8 * 12
    assert sum(torch.equal(text, plain) for text in texts) == 1
    assert torch.equal(torch.get_rng_state(), state)


class Drawing(LogitsProcessor):
    """Draws from the default generator."""

    def __call__(self, input_ids, scores):
        return scores + 0 * torch.rand_like(scores)


def test_a_processor_that_draws_is_told_of_once(target, drafters, caplog):
    logging.Logger.warning_once.cache_clear()
    options = {"do_sample": True, "max_new_tokens": 8, "eos_token_id": -1}
    with caplog.at_level(logging.WARNING, logger=noise_module.__name__):
        sample(target, prompt_of(1), options | {"logits_processor": [Forbidding()]}, drafters["pool 16"])
        assert noise_module.__name__ not in [record.name for record in caplog.records]
        for _ in range(2):
            sample(target, prompt_of(1), options | {"logits_processor": [Drawing()]}, drafters["pool 16"])
    assert [record.name for record in caplog.records].count(noise_module.__name__) == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("distribution", "batch_size", "kind", "end"), cases())
def test_on_a_gpu(target, distribution, batch_size, kind, end):
    """The same with the noise of CUDA's multinomial, rounds that grow and rounds of fixed shape."""
    target = copy.deepcopy(target).cuda()
    drafter, device = build_drafter(target, **DRAFTERS[kind]).to(target.device, target.dtype), target.device
    prompt = {name: value.to(device) for name, value in prompt_of(batch_size).items()}
    options = {"do_sample": True, "max_new_tokens": NEW_TOKENS, **LAWS[distribution], **ENDS[end]}
    torch.manual_seed(SEED)
    plain, state = target.generate(**prompt, **options), torch.cuda.get_rng_state()
    for cache in ({}, {"cache_implementation": "static"})[: 2 if batch_size == 1 else 1]:
        with faults(plain.tolist(), VOCAB_SIZE):
            torch.manual_seed(SEED)
            text = target.generate(**prompt, **options, **cache, assistant_model=drafter)
        assert text.tolist() == plain.tolist()
        assert torch.equal(torch.cuda.get_rng_state(), state)
    release_workspaces()


class Spoiling(LogitsProcessor):
    """Leaves no distribution from a length on."""

    def __init__(self, length, value):
        self.length, self.value = length, value

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, self.value) if input_ids.shape[1] >= self.length else scores


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
@pytest.mark.parametrize("num_new", [0, 5])
def test_where_no_token_can_be_drawn_an_error_says_so(target, drafters, value, num_new):
    """As in plain generation; behind the end of the text nobody asks."""
    prompt = prompt_of(1)
    length = prompt["input_ids"].shape[1] + num_new
    options = {"do_sample": True, "eos_token_id": -1, "logits_processor": [Spoiling(length, value)]}
    for drafter in (None, drafters["pool 16"]):
        with pytest.raises(RuntimeError, match=r"probability tensor|No token can be drawn"):
            sample(target, prompt, options | {"max_new_tokens": NEW_TOKENS}, drafter)
    if num_new:
        texts = [
            sample(target, prompt, options | {"max_new_tokens": num_new}, drafter)[0]
            for drafter in (None, drafters["pool 16"])
        ]
        assert torch.equal(*texts)

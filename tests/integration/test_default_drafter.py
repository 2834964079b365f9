"""The default drafter of a model: plain calls of `generate` draft, and say the same."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import weakref

import pytest
import torch
from builders import MASK, TINY, build_drafter, left_padded
from oracle import oracle
from peft import LoraConfig, get_peft_model
from recorder import Recorder
from transformers import DynamicCache, GenerationMixin, Qwen3Config, Qwen3ForCausalLM, StaticCache, pipeline

import hf_domino
from hf_domino._common.cache_name import CACHE

pytestmark = pytest.mark.transformers

PROMPT = torch.tensor([[5, 9, 33, 20, 7, 41]])
ROWS, ROWS_MASK = left_padded([PROMPT[0], PROMPT[0, :3], PROMPT[0, 1:]])
BATCH = {"inputs": ROWS, "attention_mask": ROWS_MASK}
OPTIONS = {"do_sample": False, "max_new_tokens": 24}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20}


@pytest.fixture
def drafter(target):
    return build_drafter(target)


@pytest.fixture
def attached(target, drafter):
    hf_domino.attach(target, drafter)
    yield hf_domino.attached(target)
    hf_domino.detach(target)


def text_of(target, **options):
    """Text, generator state and streamed tokens of a call with a seed."""
    streamer = Recorder() if "attention_mask" not in options and "num_return_sequences" not in options else None
    torch.manual_seed(3)
    arguments = {"inputs": PROMPT} | OPTIONS | ({"streamer": streamer} if streamer else {}) | options
    output = target.generate(**arguments)
    return output.tolist(), torch.get_rng_state().tolist(), None if streamer is None else streamer.tokens


def both(target, attached, **options):
    """The same without and with the default drafter."""
    with hf_domino.plain():
        plain = text_of(target, **options)
    assert attached.num_drafted == 0
    return plain, text_of(target, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        SAMPLED,
        BATCH,
        BATCH | SAMPLED,
        SAMPLED | {"num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 3},
        {"repetition_penalty": 1.3},
        {"max_new_tokens": 1},
    ],
)
def test_a_plain_call_drafts_and_says_the_same(target, drafter, attached, options):
    plain, drafted = both(target, attached, **options)
    assert drafted == plain
    assert (attached.num_drafted, attached.num_plain) == (1, {})
    assert drafter.stats.num_new_tokens == sum(map(len, plain[0])) - (ROWS if "inputs" in options else PROMPT).shape[
        1
    ] * len(plain[0])


def test_rounds_are_those_of_the_same_call_with_the_drafter(target, drafter, attached):
    with hf_domino.plain():
        truth = target.generate(PROMPT, **OPTIONS)
    with oracle(target, PROMPT, 0.8, truth):
        output = target.generate(PROMPT, return_dict_in_generate=True, **OPTIONS)
        rounds = drafter.stats.rows
    with oracle(target, PROMPT, 0.8, truth):
        target.generate(PROMPT, assistant_model=drafter, **OPTIONS)
    assert torch.equal(output.sequences, truth)
    assert output.stats.rows == rounds == drafter.stats.rows
    assert max(rounds[0]) > 1
    assert attached.num_drafted == 1  # the call that named a drafter goes by that


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"num_beams": 2, "do_sample": True}, "beam_sample"),
        ({"num_assistant_tokens": 0}, "num_assistant_tokens"),
        ({"guidance_scale": 2.0}, "guidance_scale"),
        ({"use_cache": False}, "use_cache"),
    ],
)
def test_a_call_that_cannot_be_drafted_is_plain(target, attached, caplog, monkeypatch, options, reason):
    streamed = {} if "num_beams" not in options else {"streamer": None}
    monkeypatch.setattr(logging.getLogger("hf_domino._common.notices"), "propagate", True)
    plain, drafted = both(target, attached, **options, **streamed)
    assert text_of(target, **options, **streamed) == drafted == plain
    assert [count for key, count in attached.num_plain.items() if key.startswith(reason)] == [2]
    assert (attached.num_drafted, len(attached.num_plain)) == (0, 1)
    assert len([record for record in caplog.records if "without the default drafter" in record.message]) == 1


def test_a_cache_that_cannot_be_rewound_is_generated_with(target, attached):
    def call():
        return target.generate(PROMPT, **{CACHE: StaticCache(target.config, max_cache_len=64)}, **OPTIONS)

    with hf_domino.plain():
        plain = call()
    assert torch.equal(call(), plain)
    assert list(attached.num_plain) == [CACHE]


def test_another_assistant_and_plain_blocks_go_by_themselves(target, attached):
    with hf_domino.plain():
        plain = target.generate(PROMPT, **OPTIONS)
    other = copy.deepcopy(target)  # copies have no default drafter
    assert torch.equal(target.generate(PROMPT, assistant_model=other, **OPTIONS), plain)
    hf_domino.attach(other, build_drafter(other))
    assert torch.equal(target.generate(PROMPT, assistant_model=other, **OPTIONS), plain)
    for default in (attached, hf_domino.attached(other)):
        assert (default.num_drafted, default.num_plain) == (0, {})


def test_what_compares_with_the_target_alone_is_plain(target, attached, drafter):
    hf_domino.check_fit(drafter, target, prompts=[[4, 5, 6], [7, 8]], max_new_tokens=4)
    assert attached.num_drafted == 0


def test_nothing_stands_on_the_target(drafter, tmp_path):
    target = Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **TINY))  # that no other test has run
    before, keys = set(vars(target)), set(target.state_dict())
    hf_domino.attach(target, drafter)
    assert set(vars(target)) == before
    assert set(target.state_dict()) == keys
    target.save_pretrained(tmp_path)
    copies = copy.deepcopy(target), pickle.loads(pickle.dumps(target)), type(target).from_pretrained(tmp_path)
    assert [hf_domino.attached(model) for model in copies] == [None] * 3


def test_models_are_forgotten_with_their_drafters(target):
    def attach_copies():
        models = [copy.copy(target) for _ in range(1000)]  # of the same weights
        drafters = [build_drafter(target) for _ in range(3)]
        for index, model in enumerate(models):
            hf_domino.attach(model, drafters[index % 3])
        models[0].generate(PROMPT, **OPTIONS)
        return [weakref.ref(model) for model in (*models, *drafters)]

    references = attach_copies()
    gc.collect()
    assert not any(reference() for reference in references)


def test_attached_again_detached_and_uninstalled(target, drafter, attached):
    text_of(target)
    other = build_drafter(target, block_size=4)
    hf_domino.attach(target, other)
    assert hf_domino.attached(target).drafter is other
    assert hf_domino.attached(target).num_drafted == 0
    text_of(target)
    hf_domino.uninstall()
    try:
        text_of(target)
        with pytest.raises(ValueError, match=r"the patch must be installed .*hf_domino.install"):
            hf_domino.attach(target, drafter)
    finally:
        hf_domino.install()
    assert (hf_domino.attached(target).num_drafted, attached.num_drafted) == (1, 1)
    hf_domino.detach(target)
    hf_domino.detach(target)
    assert hf_domino.attached(target) is None
    text_of(target)
    assert other.stats.num_new_tokens == OPTIONS["max_new_tokens"]


def test_what_does_not_fit_is_told_when_it_is_attached(target, tiny_llama, attached, drafter):
    refused = {
        "target_model_type": build_drafter(tiny_llama),
        "device": build_drafter(target).to("meta"),
        "default drafter must be a DominoDraftModel": tiny_llama,
    }
    for words, wrong in refused.items():
        with pytest.raises(ValueError, match=words):
            hf_domino.attach(target, wrong)
    with pytest.raises(ValueError, match=r"a model that generates, got 'dict'"):
        hf_domino.attach({}, drafter)
    assert hf_domino.attached(target) is attached


def test_errors_inside_rise_and_leave_the_next_call_alone(target, drafter, attached, monkeypatch):
    def fail(*args):
        raise ValueError("somebody else's")

    with pytest.raises(ValueError, match="somebody else's"):
        target.generate(PROMPT, prefix_allowed_tokens_fn=fail, **OPTIONS)
    with monkeypatch.context() as patch:
        patch.setattr("hf_domino.integration.assisted_call.check_prepared", fail)
        with pytest.raises(ValueError, match="somebody else's"):
            target.generate(PROMPT, **OPTIONS)
    monkeypatch.setattr(drafter, "fuse_context", fail)
    with pytest.raises(ValueError, match="somebody else's"):
        target.generate(PROMPT, **OPTIONS)
    monkeypatch.undo()
    drafted = text_of(target)
    with hf_domino.plain():
        assert drafted == text_of(target)
    assert attached.num_plain == {}


@pytest.mark.parametrize("num_cached", [0, 3])
def test_a_drafter_that_cannot_begin_leaves_the_windows_of_a_cache_alone(monkeypatch, num_cached):
    config = Qwen3Config(use_sliding_window=True, sliding_window=8, max_window_layers=0, **TINY)
    target = Qwen3ForCausalLM(config).eval()
    drafter = build_drafter(target)
    cache = DynamicCache(config=config)
    if num_cached:
        with torch.no_grad():
            target(PROMPT[:, :num_cached], **{CACHE: cache})
    caches = [copy.deepcopy(cache) for _ in range(3)]

    def text_of_call(cache):
        text = target.generate(PROMPT, **{CACHE: cache}, **OPTIONS).tolist()
        assert [layer.keys.shape[2] for layer in cache.layers] == [7] * config.num_hidden_layers
        return text

    plain = text_of_call(caches[0])
    hf_domino.attach(target, drafter)
    drafter.memory = ["a text"]
    assert text_of_call(caches[1]) == plain
    assert hf_domino.attached(target).num_plain == {"drafter.memory": 1}
    drafter.memory = None

    def fail(*args):
        raise RuntimeError("no scorer")

    monkeypatch.setattr(drafter, "scorer", fail)
    with pytest.raises(RuntimeError, match="no scorer"):
        target.generate(PROMPT, **{CACHE: caches[2]}, **OPTIONS)
    with hf_domino.plain():
        assert text_of_call(caches[2]) == plain


def test_detached_in_a_call(target, drafter, attached):
    calls = []

    def detach(row, ids):
        calls.append(len(ids))
        hf_domino.detach(target)
        return list(range(MASK + 1, 64))

    text = target.generate(PROMPT, prefix_allowed_tokens_fn=detach, **OPTIONS)
    assert (drafter.stats.num_new_tokens, attached.num_drafted) == (24, 1)
    assert torch.equal(target.generate(PROMPT, prefix_allowed_tokens_fn=detach, **OPTIONS), text)
    assert attached.num_drafted == 1


def test_threads_draft_by_themselves(target, drafter, attached):
    """`plain` holds for its own thread, and the default drafter for all."""
    prompts = [PROMPT.roll(shift, 1) for shift in range(4)]
    with hf_domino.plain():
        plain = [target.generate(prompt, **OPTIONS) for prompt in prompts]
        texts = {}
        work = [
            threading.Thread(target=lambda i=i: texts.update({i: target.generate(prompts[i], **OPTIONS)}))
            for i in range(4)
        ]
        [thread.start() for thread in work]
        hf_domino.attach(copy.deepcopy(target), drafter)
        [thread.join() for thread in work]
    assert all(torch.equal(texts[i], plain[i]) for i in range(4))
    assert attached.num_drafted == 4


def test_by_name_in_a_pipeline_and_under_peft(saved_pair):
    generator, prompt = pipeline("text-generation", model=str(saved_pair[0])), "def f(x):"
    options = {"do_sample": False, "max_new_tokens": 12}
    plain = generator(prompt, **options)
    hf_domino.attach(generator.model, str(saved_pair[1]))
    assert generator(prompt, **options) == plain
    assert hf_domino.attached(generator.model).num_drafted == 1
    adapted = get_peft_model(generator.model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    default = hf_domino.attached(adapted)
    with hf_domino.plain():
        text = adapted.generate(input_ids=PROMPT, **OPTIONS)
    assert torch.equal(adapted.generate(input_ids=PROMPT, **OPTIONS), text)
    compiled = torch.compile(generator.model)
    assert torch.equal(compiled.generate(PROMPT, **OPTIONS), text)
    assert hf_domino.attached(compiled) is default
    assert default.num_drafted == 3
    assert not isinstance(generator.model, type(adapted))


def test_a_loop_that_is_driven_by_hand_is_the_targets_own(target, attached):
    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        return GenerationMixin._sample(
            model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs
        )

    target.generate(PROMPT, custom_generate=decode, **OPTIONS)
    assert attached.num_drafted == 0


@pytest.mark.parametrize("num_by_position", [1, 2, 3])
def test_a_loop_that_is_driven_with_arguments_by_position_is_the_targets_own(target, attached, num_by_position):
    """Whichever of them are given by name."""

    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        given = {"logits_processor": logits_processor, "stopping_criteria": stopping_criteria}
        given |= {"generation_config": generation_config}
        by_position = list(given.values())[:num_by_position]
        by_name = dict(list(given.items())[num_by_position:])
        return GenerationMixin._sample(model, input_ids, *by_position, **by_name, **kwargs)

    with hf_domino.plain():
        plain = target.generate(PROMPT, **OPTIONS)
    assert torch.equal(target.generate(PROMPT, custom_generate=decode, **OPTIONS), plain)
    assert attached.num_drafted == 0


def test_an_assisted_loop_that_is_driven_by_position_drafts(target, drafter):
    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        call = (model, input_ids, logits_processor, stopping_criteria, generation_config)
        return GenerationMixin._assisted_decoding(*call, assistant_model=drafter, **kwargs)

    plain = target.generate(PROMPT, **OPTIONS)
    assert torch.equal(target.generate(PROMPT, custom_generate=decode, **OPTIONS), plain)
    assert drafter.stats.num_new_tokens == OPTIONS["max_new_tokens"]


def test_a_memory_is_attached_with_the_drafter(target, drafter, forward_clock):
    """Calls that know nothing of it look up in the texts of earlier ones."""
    plain = target.generate(PROMPT, **OPTIONS)
    memory = hf_domino.LookupMemory()
    hf_domino.attach(target, drafter, memory=memory)
    try:
        for _ in range(2):
            assert torch.equal(target.generate(PROMPT, **OPTIONS), plain)
        assert drafter.stats.num_lookups
        assert drafter.memory is memory
        hf_domino.attach(target, drafter)
        assert drafter.memory is memory, "another call of attach leaves it"
        with pytest.raises(ValueError, match="memory must be a LookupMemory or None, got 'texts'"):
            hf_domino.attach(target, drafter, memory="texts")
    finally:
        hf_domino.detach(target)
    assert len(memory) >= plain.shape[1]


def test_a_drafter_that_is_attached_by_name_is_not_that_of_calls(target):
    """What a user attaches, with a memory of theirs, is nothing that a later call of that name reads or fills."""
    target.generate(PROMPT, assistant_model="recycling", **OPTIONS)
    memory = hf_domino.LookupMemory()
    hf_domino.attach(target, "recycling", memory=memory)
    target.generate(PROMPT, **OPTIONS)
    default = hf_domino.attached(target).drafter
    hf_domino.detach(target)
    held = len(memory)
    assert held
    target.generate(PROMPT + 1, assistant_model="recycling", **OPTIONS)
    assert len(memory) == held
    default = weakref.ref(default)
    gc.collect()
    assert default() is None, "it goes when it is detached"


def test_a_call_may_limit_its_lookups(target, drafter):
    hf_domino.attach(target, drafter, memory=hf_domino.LookupMemory())
    try:
        for _ in range(2):
            target.generate(PROMPT, **OPTIONS, prompt_lookup_num_tokens=2)
        rounds = zip(drafter.stats.proposed[0], drafter.stats.looked_up[0], strict=True)
        assert {count for count, is_lookup in rounds if is_lookup} <= {1, 2}
        assert drafter.stats.num_lookups
    finally:
        hf_domino.detach(target)

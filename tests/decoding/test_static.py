"""Rounds of fixed shape give what rounds that grow give, launched one by one and played from recordings alike."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import weakref

import families
import pytest
import torch
from builders import build_drafter, left_padded
from oracle import at_most, oracle, proposed
from recorded_graphs import RecordedGraphs, note_transfers, recorded_graphs
from test_families import FAMILIES, NEW_TOKENS, PROMPT, build
from transformers import LogitsProcessor, StaticCache

import hf_domino
from hf_domino._common.cache_name import CACHE
from hf_domino.decoding import support
from hf_domino.decoding.static import graphs

pytestmark = pytest.mark.transformers

GREEDY = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
STATIC = {"cache_implementation": "static"}
LAWS = {
    "warpers": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "eta": {"eta_cutoff": 1e-3},
    "penalty": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 3, "top_k": 10},
}


@pytest.fixture(params=["launched", "recorded"])
def stages(request):
    """Runs a test with stages that are called, and with stages that are recorded once and played from then on."""
    with recorded_graphs() if request.param == "recorded" else contextlib.nullcontext():
        yield request.param
    hf_domino.release_workspaces()


@pytest.fixture
def recorded():
    """The graphs of each workspace that a test makes, whose stages are recorded once and played from then on."""
    with recorded_graphs() as made:
        yield made


@pytest.fixture(scope="module")
def target():
    return build("Mistral")  # a sliding window shorter than the prompt


def assert_equal_to_plain(target, drafter, prompt=PROMPT, accuracies=(0.7,), **options):
    options = GREEDY | options
    plain, length = target.generate(prompt, **options), {"max_new_tokens": options["max_new_tokens"]}
    has_ended = plain.shape[1] < prompt.shape[1] + options["max_new_tokens"]
    for accuracy in accuracies:
        with oracle(target, prompt, accuracy, None if has_ended else plain, do_sample=False, **length):
            assisted = target.generate(prompt, assistant_model=drafter, **STATIC, **options)
        assert assisted.tolist() == plain.tolist()
    return plain


# Built of the same parts as others here, where a stage is concerned.
PSEUDO_TOKENS = "Qwen2", "Olmo2", "Olmo3", "Granite", "Phi3", "Cohere2", "Qwen3Moe"


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.slow if family in PSEUDO_TOKENS else ()) for family in FAMILIES]
)
def test_every_family_can_be_recorded(family, make_drafter, recorded):
    target = build(family)
    assert_equal_to_plain(target, make_drafter(target), accuracies=(0.8,))


@pytest.mark.parametrize(
    ("projector_type", "shift_label", "draft_pool_size", "markov_head_type"),
    [
        *(("domino", True, None, None), ("domino", False, 16, None)),
        *(("dflash", True, 16, None), ("dflash", False, None, None)),
        *(("dspark", False, 16, "gated"), ("dspark", True, None, "rnn"), ("dflash2", True, None, None)),
        ("dfly", False, 16, None),
        ("xpress", True, None, None),
        ("xpress", False, 16, None),
    ],
)
def test_every_kind_of_drafter(
    tiny_qwen3, make_drafter, recorded, projector_type, shift_label, draft_pool_size, markov_head_type
):
    options = {"projector_type": projector_type, "shift_label": shift_label, "draft_pool_size": draft_pool_size}
    options |= {"markov_head_type": markov_head_type} if markov_head_type else {}
    drafter = make_drafter(tiny_qwen3, **options)
    assert_equal_to_plain(tiny_qwen3, drafter, accuracies=(0.0, 0.7), eos_token_id=-1)
    lengths = []
    for cache in ({}, STATIC):  # and the drafts are the same ones
        tiny_qwen3.generate(PROMPT, assistant_model=drafter, **GREEDY, **cache)
        lengths.append(drafter.stats.acceptance_lengths)
    assert lengths[0] == lengths[1]


def test_budgets_and_ends_inside_a_block(target, stages, make_drafter):
    drafter = make_drafter(target)
    for max_new_tokens in (1, 2, 5, 6, 7, 8, 13):
        plain = assert_equal_to_plain(target, drafter, accuracies=(0.0, 1.0), max_new_tokens=max_new_tokens)
    for token in plain[0, PROMPT.shape[1] :].tolist()[4::4]:
        plain = assert_equal_to_plain(target, drafter, accuracies=(0.9,), eos_token_id=token)
        assert plain.shape[1] < PROMPT.shape[1] + NEW_TOKENS


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 4, "min_new_tokens": 9, "eos_token_id": 3},
        {"bad_words_ids": [[5], [7, 8]], "prefill_chunk_size": 7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_and_prefill(target, recorded, make_drafter, options):
    assert_equal_to_plain(target, make_drafter(target), **options)


def test_stop_strings(tiny_qwen3, tiny_drafter, tiny_tokenizer, recorded):
    text = tiny_tokenizer.decode(tiny_qwen3.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] + 11 :][:2])
    plain = assert_equal_to_plain(tiny_qwen3, tiny_drafter, stop_strings=[text], tokenizer=tiny_tokenizer)
    assert plain.shape[1] < PROMPT.shape[1] + NEW_TOKENS


@pytest.mark.parametrize("distribution", LAWS)
def test_draws_are_those_of_growing_rounds(target, make_drafter, distribution):
    """The distribution itself is tested where rounds grow; here every draw is the same one."""
    drafter, options = make_drafter(target), {"do_sample": True, "max_new_tokens": 16, **LAWS[distribution]}

    def draw(**cache):
        torch.manual_seed(5)
        text = target.generate(PROMPT, assistant_model=drafter, **options, **cache)
        return text.tolist(), drafter.stats.acceptance_lengths

    grown = draw()
    assert draw(**STATIC) == grown
    with recorded_graphs() as made:
        assert draw(**STATIC) == draw(**STATIC) == grown
        is_stage = distribution != "eta"  # which reads a result back
        assert (made[0].names == {"backbone", "choose_chain", "target_forward", "accept"}) == is_stage


@pytest.mark.parametrize("family", ["Mistral", "GPT2"])
def test_left_padding_and_positions(family, recorded, make_drafter):
    target = build(family)
    ids, mask = left_padded([PROMPT[0, :5], PROMPT[0]])
    drafter, positions = make_drafter(target), torch.arange(3, 3 + PROMPT.shape[1])[None]
    assert_equal_to_plain(target, drafter, ids[:1], attention_mask=mask[:1])
    assert_equal_to_plain(target, drafter, position_ids=positions)
    if family == "GPT2":
        assert_equal_to_plain(target, drafter, token_type_ids=PROMPT + 1)


@pytest.mark.parametrize("family", ["GPT2", "opt", "bart"])
@pytest.mark.parametrize(("fields", "first"), [({}, 0), ({"draft_tree_size": 11}, 4)], ids=["chains", "trees"])
def test_no_text_behind_the_last_learned_position(family, fields, first, make_drafter):
    """Plain generation raises there; up to there it writes text, whatever a block of fixed width needs."""
    limit, room = {"n_positions": 32}, 32 - first - PROMPT.shape[1]
    if family != "GPT2":
        limit = {"max_position_embeddings": 32}
    target = build(family, **limit) if family == "GPT2" else families.build(family, **limit)
    options, drafter = GREEDY | {"eos_token_id": -1, "pad_token_id": 0}, make_drafter(target, **fields)
    if first and family != "bart":
        options["position_ids"] = torch.arange(first, first + PROMPT.shape[1])[None]
    for num_more in (0, 1):
        assert_equal_to_plain(target, drafter, accuracies=(0.9,), **options | {"max_new_tokens": room + num_more})
    if family == "bart":  # its positions are its own
        return
    for options["cache_implementation"] in (None, "static"):
        with pytest.raises(IndexError):
            target.generate(PROMPT, assistant_model=drafter, **options | {"max_new_tokens": room + 4})


def test_embeddings_as_prompt(tiny_qwen3, tiny_drafter, stages):
    embeds = tiny_qwen3.get_input_embeddings()(PROMPT).detach()
    for options in ({"inputs_embeds": embeds}, {"inputs_embeds": embeds, "input_ids": PROMPT}):
        plain = tiny_qwen3.generate(**options, **GREEDY)
        assert torch.equal(tiny_qwen3.generate(**options, assistant_model=tiny_drafter, **GREEDY, **STATIC), plain)


def test_scores_and_logits_stay_what_they_were(target, stages, make_drafter):
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    options = GREEDY | wanted | {"repetition_penalty": 1.2}
    plain = target.generate(PROMPT, **options)
    static = target.generate(PROMPT, assistant_model=make_drafter(target), **options, **STATIC)
    for name in ("scores", "logits"):
        torch.testing.assert_close(getattr(static, name), getattr(plain, name), atol=1e-4, rtol=1e-4)


def test_a_returned_cache_is_a_copy_to_go_on_from(tiny_qwen3, tiny_drafter, stages):
    first = {**GREEDY, "return_dict_in_generate": True}
    turns = [tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, **first, **o) for o in ({}, STATIC)]
    tiny_qwen3.generate(PROMPT.flip(1), assistant_model=tiny_drafter, **GREEDY, **STATIC)  # in the same buffers
    ids = torch.cat((turns[0].sequences, PROMPT), dim=1)
    texts, lengths = [], []
    for turn in turns:
        options = GREEDY | {"past_key_values": turn.past_key_values}
        texts.append(tiny_qwen3.generate(ids, assistant_model=tiny_drafter, **options))
        lengths.append(tiny_drafter.stats.acceptance_lengths)
    assert torch.equal(*texts)
    assert lengths[0] == lengths[1]  # the drafter's context went along
    assert torch.equal(texts[0], tiny_qwen3.generate(ids, **GREEDY))


def test_later_calls_take_the_buffers_and_graphs_of_the_first(target, make_drafter, recorded):
    drafter = make_drafter(target)
    for prompt, new_tokens in ((PROMPT, 20), (PROMPT[:, :3], 30), (PROMPT.flip(1), 10), (PROMPT.repeat(1, 2), 3)):
        assert_equal_to_plain(target, drafter, prompt, max_new_tokens=new_tokens)
    assert [made.num_captured for made in recorded] == [4]  # backbone, correction, target forward, acceptance
    assert_equal_to_plain(target, drafter, PROMPT, max_new_tokens=70)  # longer than what is there
    assert [made.num_captured for made in recorded] == [4, 4]


def test_a_call_finds_nothing_of_those_before(target, stages, make_drafter):
    """Prompts of other padding in one workspace: text and drafts are those of rounds that grow."""
    drafter = make_drafter(target)
    for length in (20, 5, 11):
        ids, mask = left_padded([PROMPT[0, :length].flip(0), PROMPT[0]])
        options, found = GREEDY | {"attention_mask": mask[:1], "max_new_tokens": 16}, []
        plain = target.generate(ids[:1], **options)
        for cache in ({}, STATIC):
            with proposed() as rounds, oracle(target, ids[:1], 0.7, plain):
                text = target.generate(ids[:1], assistant_model=drafter, **cache, **options)
            found.append((text.tolist(), [tokens for _, _, tokens in rounds]))
        assert found[0] == found[1]
        assert found[0][0] == plain.tolist()


@pytest.mark.parametrize(
    ("distribution", "num_drafted"),
    [({"do_sample": False}, 64), ({"do_sample": True, "top_k": 20, "repetition_penalty": 1.04}, 40)],
    ids=["all tokens", "a draft vocabulary"],
)
def test_the_host_reads_once_a_round(tiny_qwen3, make_drafter, monkeypatch, recorded, distribution, num_drafted):
    """And sends nothing: on a GPU both would wait for the device."""
    drafter = make_drafter(tiny_qwen3).restricted(range(num_drafted))
    options = {"max_new_tokens": 40, "eos_token_id": -1, "assistant_model": drafter, **distribution, **STATIC}
    tiny_qwen3.generate(PROMPT, **options)  # makes the recordings
    reads = note_transfers(monkeypatch)
    counts = []
    for new_tokens in (20, 40):
        reads.clear()
        tiny_qwen3.generate(PROMPT, **options | {"max_new_tokens": new_tokens})
        counts.append((len(reads), drafter.stats.num_rounds))
    # What a call reads and sends besides cancels between a short and a long text of the same buffers.
    assert counts[1][0] - counts[0][0] == counts[1][1] - counts[0][1] > 5


def test_an_interrupted_call_leaves_nothing_behind(target, make_drafter, recorded):
    drafter = make_drafter(target)

    class Interrupting(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > PROMPT.shape[1] + 7:
                raise KeyboardInterrupt
            return scores

    with pytest.raises(KeyboardInterrupt):
        target.generate(PROMPT, assistant_model=drafter, logits_processor=[Interrupting()], **GREEDY, **STATIC)
    assert_equal_to_plain(target, drafter)


def test_threads_have_buffers_of_their_own(target, make_drafter):
    drafter, results = make_drafter(target), {}
    prompts = [PROMPT, PROMPT.flip(1), PROMPT[:, :7]]
    plain = [target.generate(prompt, **GREEDY) for prompt in prompts]

    def run(index):
        results[index] = target.generate(prompts[index], assistant_model=drafter, **GREEDY, **STATIC)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(results[index], text) for index, text in enumerate(plain))


def test_workspaces_go_with_their_models(recorded):
    target = build("Qwen2")
    drafter = build_drafter(target)
    target.generate(PROMPT, assistant_model=drafter, **GREEDY, **STATIC)
    kept = [weakref.ref(each) for each in (target, drafter, recorded.pop())]
    del target, drafter
    gc.collect()
    assert [one() for one in kept] == [None] * 3


def test_moved_weights_are_not_replayed(make_drafter, recorded):
    target = build("Qwen2")
    drafter = make_drafter(target)
    assert_equal_to_plain(target, drafter)
    target.load_state_dict({name: tensor + 0.05 for name, tensor in target.state_dict().items()})
    assert_equal_to_plain(target, drafter)  # in place: the graphs see it
    assert len(recorded) == 1
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.detach().flip(0))
    assert_equal_to_plain(target, drafter)
    drafter.config.draft_pool_size = 8
    assert_equal_to_plain(target, drafter)
    assert len(recorded) == 3


def test_a_forward_that_was_replaced_is_seen(make_drafter, recorded):
    target = build("Qwen2")
    drafter = make_drafter(target)
    before = assert_equal_to_plain(target, drafter)
    original = target.forward

    def shifted(*args, **kwargs):
        outputs = original(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, dims=-1)
        return outputs

    target.forward = shifted
    assert not torch.equal(assert_equal_to_plain(target, drafter), before)
    del target.forward
    assert_equal_to_plain(target, drafter)
    assert len(recorded) == 3


@pytest.mark.parametrize("setting", ["TF32", "attention"])
def test_graphs_of_other_kernels_are_not_replayed(target, make_drafter, recorded, setting):
    drafter = make_drafter(target)
    assert_equal_to_plain(target, drafter)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        if setting == "TF32":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
            assert_equal_to_plain(target, drafter)
        else:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                assert_equal_to_plain(target, drafter)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len(recorded) == 2


def test_inference_mode_and_after(target, make_drafter, stages):
    drafter = make_drafter(target)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert_equal_to_plain(target, drafter)


def test_a_stage_that_cannot_be_captured_is_launched(target, make_drafter, monkeypatch, recorded):
    drafter, warned = make_drafter(target), []
    capture = RecordedGraphs.capture

    def failing(self, stage, inputs):
        if len(warned) == 0 and self.num_captured == 1:
            raise RuntimeError("operation not permitted when stream is capturing\nand so on")
        return capture(self, stage, inputs)

    monkeypatch.setattr(RecordedGraphs, "capture", failing)
    monkeypatch.setattr(graphs.logger, "warning", lambda *arguments: warned.append(arguments[-1]))
    assert_equal_to_plain(target, drafter)
    assert warned == ["operation not permitted when stream is capturing"]
    assert recorded[0].num_captured == 3


def test_a_capture_that_runs_out_of_memory_is_tried_again(target, make_drafter, monkeypatch, recorded):
    drafter, capture, failed = make_drafter(target), RecordedGraphs.capture, []

    def failing(self, stage, inputs):
        if len(failed) < 3:
            failed.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return capture(self, stage, inputs)

    monkeypatch.setattr(RecordedGraphs, "capture", failing)
    assert_equal_to_plain(target, drafter)
    assert recorded[0].num_captured == 4


def test_a_new_temperature_leaves_the_graphs_of_the_models(tiny_qwen3, make_drafter, monkeypatch, recorded):
    """Those that are used in every call are kept; those of the oldest temperature are dropped."""
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 8)
    drafter, counts = make_drafter(tiny_qwen3), []
    for index in range(8):
        options = {"do_sample": True, "temperature": 0.5 + index / 20, "max_new_tokens": 8}
        tiny_qwen3.generate(PROMPT, assistant_model=drafter, **options, **STATIC)
        counts.append(recorded[0].num_captured)
    new = {after - before for before, after in itertools.pairwise(counts)}
    assert len(new) == 1  # how many depend on the temperature
    assert new.pop() < counts[0]
    assert recorded[0].num_kept == 8


def test_graphs_are_bounded(tiny_qwen3, make_drafter, monkeypatch, recorded):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 6)
    drafter = make_drafter(tiny_qwen3)
    for temperature in (0.5, 0.6, 0.7, 0.8):
        options = {"do_sample": True, "temperature": temperature, "max_new_tokens": 8}
        tiny_qwen3.generate(PROMPT, assistant_model=drafter, **options, **STATIC)
        assert 4 <= recorded[0].num_kept <= 6


def test_short_rounds_are_filled_up(target, stages, make_drafter):
    """A round that proposes fewer tokens, or none, is verified at one of a few widths."""
    with at_most(itertools.cycle((3, 0, 5, 0, 0, 1, 6))):
        assert_equal_to_plain(target, make_drafter(target), accuracies=(0.8,))


@pytest.mark.parametrize("do_sample", [False, True])
def test_paced_blocks(target, recorded, make_drafter, do_sample):
    drafter = make_drafter(target, draft_length="adaptive")
    if do_sample:
        target.generate(PROMPT, assistant_model=drafter, do_sample=True, max_new_tokens=40, **STATIC)
    else:
        assert_equal_to_plain(target, drafter, accuracies=(0.0, 1.0), max_new_tokens=40)
    assert set(drafter.stats.proposed[0]) <= {0, 1, 2, 4, drafter.config.num_draft_tokens}


@pytest.mark.parametrize("draft_tree_size", [None, 11])
def test_rounds_that_capture_are_not_timed(target, make_drafter, monkeypatch, draft_tree_size):
    """What a capture takes says nothing of later rounds, so they are chosen as if it took no time."""
    plain = target.generate(PROMPT, **GREEDY | {"max_new_tokens": 60})
    capture = RecordedGraphs.capture

    def proposed_if_a_capture_takes(seconds):
        ticks, elapsed = itertools.count(), [0.0]

        def capture_slowly(self, stage, inputs):
            elapsed[0] += seconds
            return capture(self, stage, inputs)

        drafter = make_drafter(target, draft_length="adaptive", draft_tree_size=draft_tree_size)
        with monkeypatch.context() as patch, recorded_graphs() as made, oracle(target, PROMPT, 0.6, plain):
            patch.setattr(RecordedGraphs, "capture", capture_slowly)
            patch.setattr(time, "perf_counter", lambda: next(ticks) + elapsed[0])
            text = target.generate(PROMPT, assistant_model=drafter, **GREEDY | {"max_new_tokens": 60}, **STATIC)
        assert torch.equal(text, plain)
        assert made[0].num_captured >= 8
        return drafter.stats.proposed[0]

    assert proposed_if_a_capture_takes(100.0) == proposed_if_a_capture_takes(0.0)


REFUSED_TARGETS = {
    "rope_type .* got 'dynamic'": lambda: build(
        "Qwen2", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "got 'LinearAttentionLayer'": lambda: families.build("lfm2"),
    "model_type .* got 'gpt_neo'": lambda: families.build("gpt_neo"),  # attention goes by the length of the cache
}


@pytest.mark.parametrize("message", REFUSED_TARGETS)
def test_refused_targets(make_drafter, message):
    target = REFUSED_TARGETS[message]()
    with pytest.raises(ValueError, match=message):
        target.generate(PROMPT, assistant_model=make_drafter(target), max_new_tokens=4, **STATIC)


def test_refused_calls(tiny_qwen3, tiny_drafter):
    cache = StaticCache(config=tiny_qwen3.config, max_cache_len=64)
    for options, message in (
        ({"cache_implementation": "offloaded_static"}, "got 'offloaded_static'"),
        (STATIC | {"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states .* False"),
        ({CACHE: cache}, f"{CACHE} must be a DynamicCache, got 'StaticCache'"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4, **options)


@pytest.mark.parametrize("method", ["domino", "dspark", "recycling"])
def test_autocast_is_refused_by_name_and_caches_grow_by_default(tiny_qwen3, make_drafter, monkeypatch, method):
    if method == "recycling":
        drafter = hf_domino.recycling(tiny_qwen3)
    else:
        drafter = make_drafter(tiny_qwen3, projector_type=method)
    assert_equal_to_plain(tiny_qwen3, drafter)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(ValueError, match=r"torch.autocast .*'static' must be off, got torch.bfloat16. Leave"):
            tiny_qwen3.generate(PROMPT, assistant_model=drafter, **GREEDY, **STATIC)
        try:
            static = tiny_qwen3.generate(PROMPT, **GREEDY, **STATIC)
        except RuntimeError:  # older versions of transformers cannot do this themselves
            static = None
        if static is not None:
            hf_domino.attach(tiny_qwen3, drafter)
            assert torch.equal(tiny_qwen3.generate(PROMPT, **GREEDY, **STATIC), static)
            num_plain = hf_domino.attached(tiny_qwen3).num_plain
            hf_domino.detach(tiny_qwen3)
            assert num_plain == {"torch.autocast with cache_implementation='static'": 1}
        monkeypatch.setattr(support, "uses_static_by_default", lambda input_ids: True)
        text = tiny_qwen3.generate(PROMPT, assistant_model=drafter, **GREEDY)
        assert text.shape[1] == PROMPT.shape[1] + GREEDY["max_new_tokens"]
        assert "torch.autocast" in drafter.stats.why_growing
    assert_equal_to_plain(tiny_qwen3, drafter)


def test_a_hook_of_an_empty_module_is_seen():
    target = build("Qwen2")
    target.model.layers[1].mlp.act_fn = torch.nn.Sequential()  # which is false, as it has no parts
    drafter, texts = build_drafter(target), []
    with recorded_graphs():
        for _ in range(2):
            plain = target.generate(PROMPT, **GREEDY)
            texts.append(plain)
            assert torch.equal(target.generate(PROMPT, assistant_model=drafter, **GREEDY, **STATIC), plain)
            target.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, inputs, output: -output)
    assert not torch.equal(*texts)

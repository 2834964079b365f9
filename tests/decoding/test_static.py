"""Rounds of fixed shape give what rounds that grow give, launched one by one and played from recordings alike."""

from __future__ import annotations

import contextlib
import gc
import threading

import families
import pytest
import torch
import transformers
from builders import EOS, PAD, build_drafter, left_padded
from oracle import oracle
from recorded_graphs import RecordedGraphs, recorded_graphs
from test_families import FAMILIES, NEW_TOKENS, PROMPT, build
from transformers import LogitsProcessor, LogitsProcessorList, StaticCache

import hf_domino
from hf_domino._common.cache_name import CACHE
from hf_domino.decoding import loop
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.static import graphs, workspace
from hf_domino.decoding.static.graphs import StageGraphs
from hf_domino.decoding.static.target import StaticRunner, fitting_width

GREEDY = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
STATIC = {"cache_implementation": "static"}
LAWS = {
    "temperature": {"temperature": 0.7},
    "warpers": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "eta": {"eta_cutoff": 1e-3},
    "penalty": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 3, "top_k": 10},
}
RULES = {"coupled": {}, "residual": {"acceptance_rule": "residual"}}
RULES["greedy drafts"] = RULES["residual"] | {"draft_law": "greedy"}


@pytest.fixture(params=["launched", "recorded"])
def stages(request):
    """Runs a test with stages that are called, and with stages that are recorded once and played from then on."""
    with recorded_graphs() if request.param == "recorded" else contextlib.nullcontext():
        yield request.param
    workspace.release_workspaces()


@pytest.fixture(scope="module")
def target():
    return build("Mistral")  # a sliding window shorter than the prompt


def assert_equal_to_plain(target, drafter, prompt=PROMPT, accuracies=(0.0, 0.7), **options):
    options = GREEDY | options
    plain, length = target.generate(prompt, **options), {"max_new_tokens": options["max_new_tokens"]}
    has_ended = plain.shape[1] < prompt.shape[1] + options["max_new_tokens"]
    for accuracy in accuracies:
        with oracle(target, prompt, accuracy, None if has_ended else plain, do_sample=False, **length):
            assisted = target.generate(prompt, assistant_model=drafter, **STATIC, **options)
        assert assisted.tolist() == plain.tolist()
    return plain


def test_greedy_is_lossless(tiny_qwen3, tiny_drafter, stages):
    assert_equal_to_plain(tiny_qwen3, tiny_drafter, accuracies=(0.0, 0.6, 0.9), eos_token_id=-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_recorded(family, make_drafter):
    target = build(family)
    with recorded_graphs():
        assert_equal_to_plain(target, make_drafter(target), accuracies=(0.8,))


@pytest.mark.parametrize(
    ("projector_type", "shift_label", "draft_pool_size"),
    [("domino", True, None), ("domino", False, 16), ("dflash", True, 16), ("dflash", False, None)],
)
def test_every_kind_of_drafter(tiny_qwen3, make_drafter, stages, projector_type, shift_label, draft_pool_size):
    options = {"projector_type": projector_type, "shift_label": shift_label, "draft_pool_size": draft_pool_size}
    drafter = make_drafter(tiny_qwen3, **options)
    assert_equal_to_plain(tiny_qwen3, drafter, eos_token_id=-1)
    lengths = []
    for cache in ({}, STATIC):  # and the drafts are the same ones
        tiny_qwen3.generate(PROMPT, assistant_model=drafter, **GREEDY, **cache)
        lengths.append(drafter.stats.acceptance_lengths)
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5, 6, 7, 8, 13])
def test_budgets(target, stages, make_drafter, max_new_tokens):
    assert_equal_to_plain(target, make_drafter(target), accuracies=(0.0, 1.0), max_new_tokens=max_new_tokens)


def test_end_of_text_inside_a_block(target, stages, make_drafter):
    text = target.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    for token in (text[4], text[9], text[17]):
        plain = assert_equal_to_plain(target, make_drafter(target), accuracies=(0.9,), eos_token_id=token)
        assert plain.shape[1] < PROMPT.shape[1] + NEW_TOKENS


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 4, "min_new_tokens": 9, "eos_token_id": 3},
        {"bad_words_ids": [[5], [7, 8]]},
        {"prefill_chunk_size": 7},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_and_prefill(target, stages, make_drafter, options):
    assert_equal_to_plain(target, make_drafter(target), **options)


def test_stop_strings(tiny_qwen3, tiny_drafter, tiny_tokenizer, stages):
    text = tiny_tokenizer.decode(tiny_qwen3.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] + 11 :][:2])
    plain = assert_equal_to_plain(tiny_qwen3, tiny_drafter, stop_strings=[text], tokenizer=tiny_tokenizer)
    assert plain.shape[1] < PROMPT.shape[1] + NEW_TOKENS


class Forbid(LogitsProcessor):
    """Keeps state: forbids what it has seen chosen, and notes every position it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.shape[1])
        return scores.index_fill(1, input_ids[0, -2:], -torch.inf)


def test_a_processor_with_state_sees_each_position_once(target, stages, make_drafter):
    results, seen = [], []
    for options in ({}, {"assistant_model": make_drafter(target), **STATIC}):
        processor = Forbid()
        processors = LogitsProcessorList([processor])
        results.append(target.generate(PROMPT, logits_processor=processors, **GREEDY, **options))
        seen.append(processor.seen)
    assert torch.equal(*results)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("law", "rule"),
    [*((law, "coupled") for law in LAWS), ("warpers", "residual"), ("penalty", "residual"), ("eta", "greedy drafts")],
)
def test_draws_are_those_of_growing_rounds(target, make_drafter, law, rule):
    """The law itself is tested where rounds grow; here every draw is the same one."""
    drafter, options = make_drafter(target, **RULES[rule]), {"do_sample": True, "max_new_tokens": 30, **LAWS[law]}

    def draw(**cache):
        torch.manual_seed(5)
        text = target.generate(PROMPT, assistant_model=drafter, **options, **cache)
        return text.tolist(), drafter.stats.acceptance_lengths

    grown = draw()
    assert draw(**STATIC) == grown
    with recorded_graphs() as made:
        assert draw(**STATIC) == draw(**STATIC) == grown
        is_stage = rule == "coupled" and law != "eta"  # which reads a result back, as drafts of their own law do
        assert (made[0].names == {"backbone", "rollout", "verify", "judge"}) == is_stage


@pytest.mark.parametrize("family", ["Mistral", "GPT2"])
def test_left_padding_and_positions(family, stages, make_drafter):
    target = build(family)
    ids, mask = left_padded([PROMPT[0, :5], PROMPT[0]])
    assert_equal_to_plain(target, make_drafter(target), ids[:1], attention_mask=mask[:1])
    positions = torch.arange(3, 3 + PROMPT.shape[1])[None]
    assert_equal_to_plain(target, make_drafter(target), position_ids=positions)


def test_last_position_and_token_types(stages, make_drafter):
    target = build("GPT2")
    drafter, room = make_drafter(target), 128 - PROMPT.shape[1]
    assert_equal_to_plain(target, drafter, accuracies=(0.9,), max_new_tokens=room)
    assert_equal_to_plain(target, drafter, token_type_ids=PROMPT + 1)


@pytest.mark.parametrize("family", ["GPT2", "opt", "bart"])
@pytest.mark.parametrize("fields", [{}, {"draft_tree_size": 11}], ids=["chains", "trees"])
@pytest.mark.parametrize("first", [0, 4])
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
        for mine, other in zip(getattr(static, name), getattr(plain, name), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


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


def test_streamer(tiny_qwen3, tiny_drafter, stages):
    class Noting:
        tokens: list[int] = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.ended = True

    streamer = Noting()
    text = tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, streamer=streamer, **GREEDY, **STATIC)
    assert streamer.tokens == text[0].tolist()
    assert streamer.ended


def test_later_calls_take_the_buffers_and_graphs_of_the_first(target, make_drafter):
    drafter = make_drafter(target)
    with recorded_graphs() as made:
        for prompt, new_tokens in ((PROMPT, 30), (PROMPT[:, :3], 40), (PROMPT.flip(1), 20), (PROMPT.repeat(1, 2), 3)):
            assert_equal_to_plain(target, drafter, prompt, max_new_tokens=new_tokens)
        assert [recorded.num_captured for recorded in made] == [4]  # backbone, rollout, verification, acceptance
        assert_equal_to_plain(target, drafter, PROMPT, max_new_tokens=70)  # longer than what is there
        assert [recorded.num_captured for recorded in made] == [4, 4]


def poison(space):
    """Fill the buffers of a workspace with what no sum survives, and its lengths and inputs with others."""
    context = space.context
    states = [tensor for layer in space.cache.layers for tensor in (layer.keys, layer.values)]
    for tensor in (*states, context._keys, context._values):
        tensor.fill_(torch.nan)
    for tensor in (space.cache.length, context.start, context.length):
        tensor.fill_(3)
    for tensor in space._held.values():
        tensor.copy_(1 - tensor)
    context._length = 3


def test_a_call_finds_nothing_of_those_before(target, stages, make_drafter, monkeypatch):
    """Prompts of other padding in one workspace: text and drafts are those of rounds that grow."""
    drafter, drafted, propose = make_drafter(target), [], DraftSession.propose

    def noting(self, *args, **kwargs):
        proposals = propose(self, *args, **kwargs)
        drafted.append(proposals.tolist())
        return proposals

    monkeypatch.setattr(DraftSession, "propose", noting)
    for length in (5, 20, 11):
        ids, mask = left_padded([PROMPT[0, :length], PROMPT[0]])
        options, found = GREEDY | {"attention_mask": mask[:1], "max_new_tokens": 16}, []
        plain = target.generate(ids[:1], **options)
        for cache in ({}, STATIC):
            drafted.clear()
            with oracle(target, ids[:1], 0.7, plain):
                text = target.generate(ids[:1], assistant_model=drafter, **cache, **options)
            found.append((text.tolist(), list(drafted)))
        assert found[0] == found[1]
        assert found[0][0] == plain.tolist()
        poison(workspace._idle[target][drafter])


def test_addresses_stay(target, make_drafter):
    drafter, addresses = make_drafter(target), []
    check_block = StaticRunner.check_block

    def noting(self, anchors, proposed):
        space = self._workspace
        layers = [tensor for layer in space.cache.layers for tensor in (layer.keys, layer.values)]
        context = [space.context._keys, space.context._values, space.context.start, space.context.length]
        tensors = [*layers, space.cache.length, *context, *self._tensors.values()]
        addresses.append([tensor.data_ptr() for tensor in tensors])
        return check_block(self, anchors, proposed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StaticRunner, "check_block", noting)
        for length in (20, 9, 15):
            target.generate(PROMPT[:, :length], assistant_model=drafter, **GREEDY, **STATIC)
    assert len(addresses) > 30
    assert all(found == addresses[0] for found in addresses)


READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__")


DRAWN = {"do_sample": True, "top_k": 20, "repetition_penalty": 1.04}


@pytest.mark.parametrize("options", [{"do_sample": False}, DRAWN], ids=["greedy", "drawn and penalised"])
@pytest.mark.parametrize("num_drafted", [64, 40], ids=["all tokens", "a draft vocabulary"])
def test_the_host_reads_once_a_round(tiny_qwen3, make_drafter, monkeypatch, options, num_drafted):
    """And sends nothing: on a GPU both would wait for the device."""
    drafter, reads, rounds = make_drafter(tiny_qwen3).restricted(range(num_drafted)), [], []

    def noting(name, function):
        def call(*args, **kwargs):
            reads.append(name)
            return function(*args, **kwargs)

        return call

    run_round = loop._Generation.run_round

    def counting(self):
        start = len(reads)
        run_round(self)
        rounds.append(reads[start:])

    with recorded_graphs():
        options |= {"max_new_tokens": 40, "eos_token_id": -1, "assistant_model": drafter, **STATIC}
        tiny_qwen3.generate(PROMPT, **options)  # makes the recordings
        monkeypatch.setattr(loop._Generation, "run_round", counting)
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, noting(name, getattr(torch.Tensor, name)))
        for name in ("tensor", "as_tensor"):
            monkeypatch.setattr(torch, name, noting(f"torch.{name}", getattr(torch, name)))
        tiny_qwen3.generate(PROMPT, **options)
    assert len(rounds) > 10
    assert all(found == ["tolist"] for found in rounds), rounds


def test_stages_compile_to_one_graph_each(make_drafter, monkeypatch):
    """No break, no recompilation: nothing in a stage depends on the round."""
    target = build("Qwen2", num_hidden_layers=2)
    traced = []

    def counting(module, inputs):
        traced.append(module)
        return module.forward

    compiled = {}

    def call(self, key, stage, *inputs):
        signature = (key, *(tensor.shape for tensor in inputs))
        if signature not in compiled:
            compiled[signature] = torch.compile(stage, fullgraph=True, dynamic=False, backend=counting)
        # A graph has buffers of its own; a stride that differs is no new shape.
        return compiled[signature](*(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for tensor in inputs))

    monkeypatch.setattr(StageGraphs, "__call__", call)
    monkeypatch.setattr(torch._dynamo.config, "allow_rnn", True)  # the GRU's weights are used, never its forward
    for name in ("domino_kernels.runs_triton", "hf_domino.decoding.correcting.fused.runs_triton"):
        monkeypatch.setattr(name, lambda *arguments: False)  # decided by a context variable, which is not traced
    torch.compiler.reset()
    drafter = make_drafter(target, num_hidden_layers=1)
    options = {"do_sample": True, "top_k": 20, "eos_token_id": -1, "max_new_tokens": 40}
    target.generate(PROMPT, assistant_model=drafter, **options, **STATIC)
    assert drafter.stats.num_rounds > 10
    assert len(compiled) == len(traced) == 4


def test_an_interrupted_call_leaves_nothing_behind(target, make_drafter, stages):
    drafter = make_drafter(target)

    class Interrupting(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] > PROMPT.shape[1] + 7:
                raise KeyboardInterrupt
            return scores

    processors = LogitsProcessorList([Interrupting()])
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            target.generate(PROMPT, assistant_model=drafter, logits_processor=processors, **GREEDY, **STATIC)
        assert_equal_to_plain(target, drafter)


def test_threads_have_buffers_of_their_own(target, make_drafter):
    drafter, results = make_drafter(target), {}
    prompts = [PROMPT, PROMPT.flip(1), PROMPT[:, :7], PROMPT + 30]
    plain = [target.generate(prompt, **GREEDY) for prompt in prompts]

    def run(index):
        for _ in range(2):
            result = target.generate(prompts[index], assistant_model=drafter, **GREEDY, **STATIC)
            results.setdefault(index, []).append(torch.equal(result, plain[index]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results.get(index) for index in range(len(prompts))] == [[True] * 2] * len(prompts)


def test_workspaces_go_with_their_models():
    target = build("Qwen2")
    drafter = build_drafter(target)
    target.generate(PROMPT, assistant_model=drafter, **GREEDY, **STATIC)
    assert drafter in workspace._idle[target]
    del target, drafter
    gc.collect()
    assert not any(len(drafters) for drafters in workspace._idle.values())


def test_moved_weights_are_not_replayed(make_drafter):
    target = build("Qwen2")
    drafter = make_drafter(target)
    with recorded_graphs() as made:
        assert_equal_to_plain(target, drafter)
        target.load_state_dict({name: tensor + 0.05 for name, tensor in target.state_dict().items()})
        assert_equal_to_plain(target, drafter)  # in place: the graphs see it
        assert len(made) == 1
        target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.detach().flip(0))
        assert_equal_to_plain(target, drafter)
        drafter.config.draft_pool_size = 8
        assert_equal_to_plain(target, drafter)
        assert len(made) == 3


def test_inference_mode_and_after(target, make_drafter, stages):
    drafter = make_drafter(target)
    for mode in (True, False, True):
        with torch.inference_mode(mode):
            assert_equal_to_plain(target, drafter)


def test_a_stage_that_cannot_be_captured_is_launched(target, make_drafter, monkeypatch):
    drafter, warned = make_drafter(target), []
    capture = RecordedGraphs.capture

    def failing(self, stage, inputs):
        if getattr(stage, "__name__", None) == "_verify":
            raise RuntimeError("operation not permitted when stream is capturing\nand so on")
        return capture(self, stage, inputs)

    monkeypatch.setattr(RecordedGraphs, "capture", failing)
    monkeypatch.setattr(graphs.logger, "warning", lambda *arguments: warned.append(arguments[1:]))
    with recorded_graphs() as made:
        assert_equal_to_plain(target, drafter)
    assert warned == [("verify", "operation not permitted when stream is capturing")]
    assert made[0].num_captured == 3


def test_graphs_are_bounded(tiny_qwen3, make_drafter, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 6)
    drafter = make_drafter(tiny_qwen3)
    with recorded_graphs() as made:
        for temperature in (0.5, 0.6, 0.7, 0.8):
            options = {"do_sample": True, "temperature": temperature, "max_new_tokens": 8}
            tiny_qwen3.generate(PROMPT, assistant_model=drafter, **options, **STATIC)
            assert 4 <= len(made[0]._graphs) <= 6


def test_shadow_replays_static_calls(tiny_qwen3, tiny_drafter, stages):
    with hf_domino.shadow(share=1.0) as report:
        tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, **GREEDY, **STATIC)
    assert (report.num_replayed, report.mismatches, report.failures) == (1, [], [])
    assert report.max_kl < 1e-6


def test_phases_are_timed(tiny_qwen3, tiny_drafter):
    with hf_domino.timed_phases():
        tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, **GREEDY, **STATIC)
    phases = tiny_drafter.stats.phases
    assert all(phases[name] > 0 for name in ("draft", "rollout", "target_forward", "verify"))


def test_widths_are_few():
    assert [fitting_width(count, 16) for count in (0, 1, 2, 3, 5, 8, 9, 16)] == [1, 2, 3, 5, 9, 9, 17, 17]
    assert fitting_width(5, 6) == fitting_width(6, 6) == 7


def test_short_rounds_are_filled_up(target, stages, make_drafter, monkeypatch):
    """A round that proposes fewer tokens, or none, is verified at one of the widths."""
    drafter, propose, calls = make_drafter(target), DraftSession.propose, iter(range(1000))

    def fewer(self, prefixes, *others):
        return propose(self, prefixes, (3, 0, 5, 0, 0, 1, 6)[next(calls) % 7])

    monkeypatch.setattr(DraftSession, "propose", fewer)
    assert_equal_to_plain(target, drafter, accuracies=(0.0, 0.8))


@pytest.mark.parametrize("do_sample", [False, True])
def test_paced_blocks(target, stages, make_drafter, do_sample):
    drafter = make_drafter(target, draft_length="adaptive")
    if do_sample:
        target.generate(PROMPT, assistant_model=drafter, do_sample=True, max_new_tokens=60, **STATIC)
    else:
        assert_equal_to_plain(target, drafter, accuracies=(0.0, 0.5, 1.0), max_new_tokens=60)
    assert set(drafter.stats.proposed[0]) <= {0, 1, 2, 4, drafter.config.num_draft_tokens}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_implementation": "offloaded_static"}, "must be None, 'dynamic' or 'static', got 'offloaded_static'"),
        (STATIC | {"num_return_sequences": 2, "do_sample": True}, "batch size .* must be 1, got 2"),
        (STATIC | {"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states .* False"),
    ],
)
def test_refusals(tiny_qwen3, tiny_drafter, options, message):
    with pytest.raises(ValueError, match=message):
        tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4, **options)


def test_refused_targets(make_drafter):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    target = build("Qwen2", rope_parameters=rope)
    with pytest.raises(ValueError, match=r"rope_type .* must be one of fixed frequencies, got 'dynamic'"):
        target.generate(PROMPT, assistant_model=make_drafter(target), max_new_tokens=4, **STATIC)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 96}
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "hidden_size": 32}
    config = transformers.Lfm2Config(**sizes, **layers, eos_token_id=EOS, pad_token_id=PAD, bos_token_id=None)
    target = transformers.Lfm2ForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"layers .* must be attention layers, got 'LinearAttentionLayer'"):
        target.generate(PROMPT, assistant_model=make_drafter(target), max_new_tokens=4, **STATIC)


def test_attention_that_goes_by_the_length_of_the_cache(make_drafter):
    sizes = {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]}
    config = transformers.GPTNeoConfig(vocab_size=96, window_size=8, max_position_embeddings=64, **sizes)
    target = transformers.GPTNeoForCausalLM(config).eval()
    with pytest.raises(ValueError, match=r"model_type .* must be none of .*'gpt_neo', .* got 'gpt_neo'. Leave"):
        target.generate(PROMPT, assistant_model=make_drafter(target), max_new_tokens=4, **STATIC)


def test_refused_caches_and_loops(tiny_qwen3, tiny_drafter):
    cache = StaticCache(config=tiny_qwen3.config, max_cache_len=64)
    with pytest.raises(ValueError, match=f"{CACHE} must be a DynamicCache, got 'StaticCache'"):
        tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, past_key_values=cache, max_new_tokens=4)
    hf_domino.uninstall()
    hf_domino.attach(tiny_qwen3)
    try:
        with pytest.raises(ValueError, match="cache_implementation in an attached target must be None or 'dynamic'"):
            tiny_qwen3.generate(PROMPT, assistant_model=tiny_drafter, max_new_tokens=4, **STATIC)
    finally:
        hf_domino.detach(tiny_qwen3)
        hf_domino.install()

"""Stages compiled as `compile_config` says: which, when, with what, how often, and what happens where it fails."""

from __future__ import annotations

import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from builders import SEED, TINY, build_drafter, left_padded
from oracle import oracle
from test_families import NEW_TOKENS, PROMPT, build
from transformers import CompileConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import hf_domino
from hf_domino.decoding import support
from hf_domino.decoding.static import graphs as graphs_module
from hf_domino.decoding.static import workspace
from hf_domino.decoding.static.graphs import StageGraphs, compile_options

GREEDY = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
STATIC = {"cache_implementation": "static"}


@pytest.fixture(scope="module")
def tiny_qwen3():
    """Two layers: dynamo traces each of them, which is what takes time here."""
    torch.manual_seed(SEED)
    return Qwen3ForCausalLM(Qwen3Config(**(TINY | {"num_hidden_layers": 2, "eos_token_id": None}))).eval()


@pytest.fixture
def make_drafter():
    """Drafters of one layer, for the same reason."""
    return functools.partial(build_drafter, num_hidden_layers=1)


@pytest.fixture(autouse=True)
def fresh():
    """No workspace of another test."""
    hf_domino.release_workspaces()
    yield
    hf_domino.release_workspaces()


@pytest.fixture
def traced():
    """Graphs that the backend of `config` was given."""
    return []


@pytest.fixture
def config(traced):
    """Compiles with a backend that notes what it is given, and runs it as it is."""

    def counting(module, inputs):
        traced.append(module)
        return module.forward

    return CompileConfig(backend=counting, fullgraph=True)


@pytest.fixture
def warned(monkeypatch):
    """Stages that are said to run uncompiled, with reasons."""
    found = []
    monkeypatch.setattr(graphs_module.logger, "warning", lambda *arguments: found.append(arguments[1:]))
    return found


@pytest.fixture
def captured(monkeypatch):
    """Whether each stage was compiled that was captured: not recorded but called, those of a workspace that is made."""
    found = []

    class CalledGraphs(StageGraphs):
        def __init__(self, device, enabled=None):
            super().__init__(device, enabled=True)

        def capture(self, stage, inputs):
            if isinstance(stage, functools.partial) and None in found:
                raise RuntimeError("operation not permitted when stream is capturing")
            found.append(isinstance(stage, functools.partial))
            return SimpleNamespace(replay=lambda inputs: stage(*inputs))

    monkeypatch.setattr(workspace, "StageGraphs", CalledGraphs)
    return found


def generate(target, drafter, config=None, prompt=PROMPT, **options):
    return target.generate(prompt, assistant_model=drafter, compile_config=config, **GREEDY | STATIC | options)


def asked(config):
    """What stages are compiled with."""
    return compile_options(
        SimpleNamespace(device=torch.device("cpu")),
        GenerationConfig(compile_config=config, cache_implementation="static"),
    )


def test_text_is_that_of_the_target(make_drafter, config, traced, warned):
    target = build("GptOss", num_hidden_layers=2)
    drafter, plain = make_drafter(target), target.generate(PROMPT, **GREEDY)
    for accuracy in (0.0, 0.7):
        with oracle(target, PROMPT, accuracy, plain):
            assert torch.equal(generate(target, drafter, config), plain)
    assert len(traced) == 2  # verification and backbone, each once
    assert warned == []


def test_graphs_capture_what_was_compiled(tiny_qwen3, make_drafter, config, traced, captured):
    drafter = make_drafter(tiny_qwen3)
    plain = tiny_qwen3.generate(PROMPT, **GREEDY)
    for asked in (config, None, config):
        assert torch.equal(generate(tiny_qwen3, drafter, asked), plain)
    # Without the configuration two stages are captured as they are; the other two are the same in either case.
    assert captured == [True, False, True, False, False, False]
    assert len(traced) == 2


def test_draws_and_random_state_are_those_of_uncompiled_stages(tiny_qwen3, make_drafter, config):
    drafter, found = make_drafter(tiny_qwen3), []
    for asked in (None, config):
        torch.manual_seed(5)
        text = generate(tiny_qwen3, drafter, asked, do_sample=True, top_k=20)
        found.append((text.tolist(), drafter.stats.acceptance_lengths, torch.get_rng_state().tolist()))
    assert found[0] == found[1]


def test_later_calls_compile_nothing(tiny_qwen3, make_drafter, config, traced):
    drafter = make_drafter(tiny_qwen3)
    for prompt in (PROMPT, PROMPT[:, :5]):
        generate(tiny_qwen3, drafter, config, prompt)
        generate(tiny_qwen3, drafter, None, prompt)
        assert len(traced) == 2
    other = CompileConfig(backend=config.backend, fullgraph=False)
    generate(tiny_qwen3, drafter, other)
    assert len(traced) == 4
    generate(tiny_qwen3, drafter, config)
    assert len(traced) == 4


@pytest.mark.slow
def test_hooks_are_seen_as_they_come_and_go(tiny_qwen3, make_drafter, config, traced):
    drafter, plain = make_drafter(tiny_qwen3), tiny_qwen3.generate(PROMPT, **GREEDY)
    assert torch.equal(generate(tiny_qwen3, drafter, config), plain)
    hook = tiny_qwen3.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: -output)
    changed = tiny_qwen3.generate(PROMPT, **GREEDY)
    assert not torch.equal(changed, plain)
    for _ in range(2):
        assert torch.equal(generate(tiny_qwen3, drafter, config), changed)
    hook.remove()
    assert torch.equal(generate(tiny_qwen3, drafter, config), plain)
    assert len(traced) == 6


def test_nothing_that_is_kept_holds_a_model(make_drafter, config):
    target = build("Qwen2", num_hidden_layers=2)
    drafter = make_drafter(target)
    generate(target, drafter, config)
    kept = [weakref.ref(each) for each in (target, drafter)]
    del target, drafter
    gc.collect()
    assert [one() for one in kept] == [None] * 2


@pytest.mark.slow
def test_blocks_of_all_lengths_and_a_batch_that_ends_row_by_row_are_compiled_once(
    tiny_qwen3, make_drafter, config, traced, warned
):
    drafter = make_drafter(tiny_qwen3, draft_length="adaptive", block_size=3)
    plain = tiny_qwen3.generate(PROMPT, **GREEDY)
    assert torch.equal(generate(tiny_qwen3, drafter, config), plain)
    assert len(traced) == 2
    ids, mask = left_padded([PROMPT[0, :5], PROMPT[0], PROMPT[0, 3:12]])
    ends = [int(plain[0, -1]), int(plain[0, -4])]  # rows end at different tokens
    batch = GREEDY | {"attention_mask": mask, "pad_token_id": 0, "eos_token_id": ends}
    expected = tiny_qwen3.generate(ids, **batch)
    assert torch.equal(generate(tiny_qwen3, drafter.view(draft_length="full"), config, ids, **batch), expected)
    assert len(traced) == 4
    assert warned == []


def test_many_widths_do_not_run_into_the_limit_of_recompilations(config, traced, warned):
    graphs = StageGraphs(torch.device("cpu"))
    graphs.options = asked(config)
    widths = range(2, 2 * torch._dynamo.config.cache_size_limit + 4)
    for _ in range(2):
        for width in widths:
            (doubled,) = graphs(("target_forward", "a stage"), lambda block: (2 * block,), torch.ones(1, width))
            assert doubled.shape == (1, width)
    assert len(traced) == len(widths)
    assert warned == []


def test_compiled_stages_are_bounded(monkeypatch, config, traced):
    monkeypatch.setattr(graphs_module, "MAX_COMPILED", 3)
    graphs = StageGraphs(torch.device("cpu"))
    graphs.options = asked(config)
    for width in (2, 3, 4, 5, 5, 2):  # the last one was forgotten
        graphs("backbone", lambda block: (2 * block,), torch.ones(1, width))
    assert len(traced) == 5


def test_strides_of_axes_of_one_are_not_compiled_for(config, traced):
    graphs = StageGraphs(torch.device("cpu"))
    graphs.options = asked(config)
    for block in (torch.ones(1, 5), torch.ones(5, 1).T, torch.ones(3, 7)[1:2, :5]):
        graphs("backbone", lambda block: (2 * block,), block)
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("mode", "passed"),
    [
        ("reduce-overhead", None),
        ("default", None),
        (None, None),
        ("max-autotune", "max-autotune-no-cudagraphs"),
        ("max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
    ],
)
def test_modes_make_no_graphs_inside_graphs(mode, passed):
    assert asked(CompileConfig(mode=mode))["mode"] == passed


def test_options_reach_torch(tiny_qwen3, make_drafter, monkeypatch):
    told = []
    monkeypatch.setattr(torch, "compile", lambda function, **arguments: told.append(arguments) or function)
    drafter, options = make_drafter(tiny_qwen3), {"epilogue_fusion": True, "triton.cudagraphs": True}
    generate(tiny_qwen3, drafter, CompileConfig(dynamic=True, options=options))
    expected = {"fullgraph": False, "dynamic": False, "backend": "inductor", "mode": None}
    assert told == [expected | {"options": {"epilogue_fusion": True}}] * 3  # one to look, two to compile
    generate(tiny_qwen3, drafter, CompileConfig(mode="default", options=options))
    generate(tiny_qwen3, drafter, CompileConfig())
    assert len(told) == 3 + 1 + 3  # looked at and found, and compiled for others


@pytest.mark.parametrize("options", [{}, {"disable_compile": True, "compile_config": CompileConfig(backend="eager")}])
def test_nothing_is_compiled_unasked(tiny_qwen3, make_drafter, monkeypatch, options):
    monkeypatch.setattr(torch, "compile", None)
    tiny_qwen3.generate(PROMPT, assistant_model=make_drafter(tiny_qwen3), **GREEDY, **STATIC, **options)


def test_a_static_cache_alone_asks_for_it_on_a_gpu():
    found = {}
    for device in ("cpu", "cuda"):
        for disabled in (None, True):
            options = GenerationConfig(cache_implementation="static", disable_compile=disabled)
            found[device, disabled] = compile_options(SimpleNamespace(device=torch.device(device)), options) is not None
    assert [case for case, is_compiled in found.items() if is_compiled] == [("cuda", None)]


@pytest.mark.slow
def test_a_layer_that_is_left_to_python_writes_behind_a_prompt_as_wide_as_a_block(tiny_qwen3, make_drafter):
    drafter, attention = make_drafter(tiny_qwen3), tiny_qwen3.model.layers[1].self_attn
    prompt = PROMPT[:, : drafter.config.num_draft_tokens + 1]
    plain = tiny_qwen3.generate(prompt, **GREEDY)
    attention.forward = torch._dynamo.disable(attention.forward)
    try:
        text = generate(tiny_qwen3, drafter, CompileConfig(backend="eager"), prompt)
    finally:
        del attention.forward
    assert torch.equal(text, plain)


def test_the_last_learned_positions_compile_nothing_more(make_drafter, monkeypatch):
    compiled, target = set(), build("GPT2")

    def noting(options):
        return lambda stage, *inputs: (compiled.add((stage.__name__, inputs[-1].shape)), stage(*inputs))[1]

    monkeypatch.setattr(graphs_module, "_compiled", noting)
    call = {"max_length": target.config.n_positions, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": None}
    prompt = torch.arange(100)[None] % 64
    text = generate(target, make_drafter(target, block_size=16), CompileConfig(backend="eager"), prompt, **call)
    assert text.shape[1] == target.config.n_positions
    assert len(compiled) == 2


@pytest.mark.parametrize("reason", ["cache_implementation='static'", "quantized by FakeQuantizer"])
def test_what_is_not_compiled_is_said(tiny_qwen3, make_drafter, config, traced, monkeypatch, reason):
    said = []
    for module in (graphs_module, support):
        monkeypatch.setattr(module.logger, "warning_once", said.append)
    options = {"cache_implementation": None}
    if "quantized" in reason:
        quantizer = type("FakeQuantizer", (), {"is_compileable": False})()
        monkeypatch.setattr(tiny_qwen3, "hf_quantizer", quantizer, raising=False)
        options = STATIC
    plain = tiny_qwen3.generate(PROMPT, **GREEDY)
    assert torch.equal(generate(tiny_qwen3, make_drafter(tiny_qwen3), config, **options), plain)
    assert len(said) == 1
    assert reason in said[0]
    assert traced == []


def test_a_stage_that_cannot_be_compiled_runs_as_it_is(tiny_qwen3, make_drafter, warned):
    tried = []

    def failing(module, inputs):
        tried.append(module)
        raise OSError("no compiler here\nand so on")

    drafter, plain = make_drafter(tiny_qwen3), tiny_qwen3.generate(PROMPT, **GREEDY)
    for _ in range(2):
        assert torch.equal(generate(tiny_qwen3, drafter, CompileConfig(backend=failing)), plain)
    assert [name for name, _ in warned] == ["backbone", "target_forward"]
    assert all("no compiler here" in reason for _, reason in warned)
    assert len(tried) == 2


def test_a_compiled_stage_that_cannot_be_captured_is_captured_as_it_is(
    tiny_qwen3, make_drafter, config, warned, captured
):
    captured.append(None)  # none can be
    drafter, plain = make_drafter(tiny_qwen3), tiny_qwen3.generate(PROMPT, **GREEDY)
    for _ in range(2):
        assert torch.equal(generate(tiny_qwen3, drafter, config), plain)
    assert [name for name, _ in warned] == ["backbone", "target_forward"]
    assert captured == [None] + [False] * 4


def test_an_error_of_the_model_is_raised_as_it_is(tiny_qwen3, make_drafter, config, warned):
    def failing(module, inputs):
        if inputs[0].shape[1] < PROMPT.shape[1]:  # a block
            raise KeyError("of the model")

    hook = tiny_qwen3.model.layers[0].register_forward_pre_hook(failing)
    try:
        with pytest.raises(KeyError, match="of the model"):
            generate(tiny_qwen3, make_drafter(tiny_qwen3), config)
    finally:
        hook.remove()
    assert [name for name, _ in warned] == ["target_forward"]


@pytest.mark.parametrize(
    "fields", [{"mode": "fastest"}, {"backend": "none_such"}, {"options": {"none_such": 1}}], ids=str
)
def test_torch_refuses_what_it_does_not_know_before_any_forward(tiny_qwen3, make_drafter, fields):
    drafter = make_drafter(tiny_qwen3)
    hook = tiny_qwen3.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    try:
        with pytest.raises(RuntimeError):
            generate(tiny_qwen3, drafter, CompileConfig(**fields))
    finally:
        hook.remove()

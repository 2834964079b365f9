"""CUDA graphs on a GPU: the text and the draws of launched stages, and one synchronisation a round."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from builders import build_drafter, left_padded
from oracle import oracle
from test_families import FAMILIES, NEW_TOKENS, PROMPT, build
from transformers import CompileConfig

import hf_domino
from hf_domino.decoding.static import workspace
from hf_domino.decoding.static.graphs import StageGraphs, without_graphs

pytestmark = pytest.mark.gpu
OF_EXPERTS = ("GptOss", "Mixtral", "Qwen3Moe")
STATIC = {"cache_implementation": "static", "disable_compile": True}
GREEDY = {"do_sample": False, "max_new_tokens": NEW_TOKENS}


@pytest.fixture
def captures(monkeypatch):
    """Stages that were captured, and those that failed to be; workspaces are made anew."""
    workspace.release_workspaces()
    found = {"captured": 0, "failed": []}
    try_capture = StageGraphs._try_capture

    def noting(self, key, stage, inputs):
        graph = try_capture(self, key, stage, inputs)
        found["captured"] += graph is not None
        found["failed"] += [key] if graph is None else []
        return graph

    monkeypatch.setattr(StageGraphs, "_try_capture", noting)
    yield found
    workspace.release_workspaces()


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_lossless(family, captures):
    target = build(family).cuda()
    if family in OF_EXPERTS:  # grouped products in fp32 read sizes back
        target.set_experts_implementation("batched_mm")
    drafter, prompt = build_drafter(target).cuda(), PROMPT.cuda()
    plain = target.generate(prompt, **GREEDY)
    for accuracy in (0.0, 0.7):
        with oracle(target, prompt, accuracy, **GREEDY):
            assert torch.equal(target.generate(prompt, assistant_model=drafter, **GREEDY, **STATIC), plain)
    assert captures["failed"] == []
    assert captures["captured"] == 4


def test_fixed_shapes_are_the_default_and_batches_have_them(captures):
    target = build("Qwen2").cuda()
    drafter = build_drafter(target).cuda()
    assert torch.equal(
        target.generate(PROMPT.cuda(), assistant_model=drafter, **GREEDY), target.generate(PROMPT.cuda(), **GREEDY)
    )
    assert captures["captured"] == 4
    assert drafter.stats.why_growing is None
    ids, mask = left_padded([PROMPT[0, :5], PROMPT[0], PROMPT[0, 3:12]])
    options = GREEDY | {"attention_mask": mask.cuda(), "pad_token_id": 0}
    plain = target.generate(ids.cuda(), **options)
    with oracle(target, ids.cuda(), 0.7, plain):
        assert torch.equal(target.generate(ids.cuda(), assistant_model=drafter, **options), plain)
    assert captures["failed"] == []


LAWS = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"repetition_penalty": 1.3},
    {
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 9,
        "eos_token_id": 3,
        "suppress_tokens": [9],
        "forced_eos_token_id": 3,
    },
]


@pytest.mark.parametrize("distribution", LAWS)
def test_draws_are_those_of_launched_stages(distribution, captures):
    target = build("Qwen2").cuda()
    drafter, texts = build_drafter(target).cuda(), []
    for is_graphed in (True, True, False):
        torch.manual_seed(5)
        options = {"do_sample": True, "max_new_tokens": NEW_TOKENS, **distribution, **STATIC}
        if is_graphed:
            texts.append(target.generate(PROMPT.cuda(), assistant_model=drafter, **options))
        else:
            with without_graphs():
                texts.append(target.generate(PROMPT.cuda(), assistant_model=drafter, **options))
    assert captures["failed"] == []
    assert captures["captured"] == 4  # rollout and acceptance among them
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("distribution", [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 20}])
def test_compiled_stages_are_captured(distribution, captures, monkeypatch):
    target, compiled = build("Qwen2").cuda(), []
    drafter, texts, states, try_capture = build_drafter(target).cuda(), [], [], StageGraphs._try_capture

    def noting(self, name, stage, inputs):
        graph = try_capture(self, name, stage, inputs)
        compiled.extend([name] if isinstance(stage, partial) else [])
        return graph

    monkeypatch.setattr(StageGraphs, "_try_capture", noting)
    options = {"max_new_tokens": NEW_TOKENS, **distribution}
    static = {"assistant_model": drafter, **STATIC}
    asking = static | {"disable_compile": False, "compile_config": CompileConfig(fullgraph=True)}
    for assistant in (static, asking, asking):
        torch.manual_seed(5)
        texts.append(target.generate(PROMPT.cuda(), **options, **assistant))
        states.append(torch.cuda.get_rng_state())
    assert captures["failed"] == []
    assert captures["captured"] == 6  # four, and the compiled two
    assert sorted(compiled) == ["backbone", "target_forward"]
    if not distribution["do_sample"]:
        assert torch.equal(texts[0], target.generate(PROMPT.cuda(), **options))
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize("lengths", [(20, 40, 80)])
def test_graphs_outlive_what_transformers_compiles(lengths, captures):
    """Transformers' own graphs free the workspaces of products, of which ours must not read any."""
    target = build("Qwen2").cuda().bfloat16()
    drafter, prompt = build_drafter(target).cuda(), PROMPT.cuda()
    options = {"do_sample": False, "assistant_model": drafter, **STATIC}
    text = target.generate(prompt, max_new_tokens=lengths[0], **options)
    for length in lengths:
        target.generate(prompt, max_new_tokens=length, do_sample=False, cache_implementation="static")
        torch.cuda.empty_cache()
        assert torch.equal(target.generate(prompt, max_new_tokens=lengths[0], **options), text)
        torch.cuda.synchronize()
    assert captures["failed"] == []


@pytest.mark.parametrize("distribution", [{}, {"repetition_penalty": 1.04}])
@pytest.mark.parametrize("method", ["domino", "recycling"])
def test_one_synchronisation_a_round(method, distribution, captures):
    target = build("Qwen2").cuda()
    if method == "recycling":
        drafter = hf_domino.recycling(target, draft_length="full", draft_tree_size=16)
    else:
        drafter = build_drafter(target).cuda()
    prompt, counts = PROMPT.cuda(), []
    options = {"assistant_model": drafter, "do_sample": False, **distribution, **STATIC}
    for new_tokens in (40, 10, 40):  # the first captures
        if method == "recycling":
            drafter.forget()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                target.generate(prompt, max_new_tokens=new_tokens, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        synchronisations = [warning for warning in caught if "synchroniz" in str(warning.message)]
        counts.append((len(synchronisations), drafter.stats.num_rounds))
    # Prompt and bookkeeping cancel between a short and a long text of the same buffers.
    assert counts[2][0] - counts[1][0] == counts[2][1] - counts[1][1]


@pytest.mark.parametrize("distribution", [*LAWS, {"do_sample": True, "repetition_penalty": 1.3}])
def test_trees_are_lossless(distribution, captures):
    target = build("Mistral").cuda()
    drafter = build_drafter(target, draft_tree_size=12).cuda()
    texts = []
    for options in ({}, {"assistant_model": drafter}, {"assistant_model": drafter} | STATIC):
        torch.manual_seed(0)
        texts.append(target.generate(PROMPT.cuda(), **GREEDY | distribution, **options))
        assert not options or drafter.stats.chain is None
    assert captures["captured"] == 6
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert captures["failed"] == []


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("distribution", LAWS)
def test_token_recycling_is_lossless(distribution, num_rows, captures):
    """By default in graphs, which later calls with a table that has changed replay."""
    target = build("Qwen2").cuda()
    drafter = hf_domino.recycling(target, draft_length="full", draft_tree_size=16)
    ids, mask = left_padded([PROMPT[0], PROMPT[0, :5], PROMPT[0, 3:12]][:num_rows])
    options = GREEDY | {"attention_mask": mask.cuda(), "pad_token_id": 0, "eos_token_id": -1} | distribution
    plain = target.generate(ids.cuda(), **options)
    for _ in range(2):
        assert torch.equal(target.generate(ids.cuda(), assistant_model=drafter, **options), plain)
        assert drafter.stats.chain is None
        assert drafter.stats.why_growing is None
    assert captures["failed"] == []
    if num_rows == 1 and not distribution:
        # Three stages of trees alone, and four each of a tree and of a plain decode step.
        assert captures["captured"] == 11

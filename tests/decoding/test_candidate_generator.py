"""`DominoCandidateGenerator`, driven by Transformers' own assisted loop, without the patch."""

from __future__ import annotations

import functools

import families
import pytest
import torch
from builders import PAD, TINY
from method_table import EVERY, RECYCLING
from oracle import faults, proposed
from test_sampling_distribution import P_VALUE, VOCAB, exact_law, p_value
from test_sampling_distribution import PROMPT as SHORT_PROMPT
from test_sampling_distribution import target as twelve_tokens  # noqa: F401, a fixture
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import hf_domino
from hf_domino import DominoCandidateGenerator
from hf_domino._common.cache_name import CACHE

PROMPT = torch.arange(7, 19)[None]
GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD, "eos_token_id": -1}
STATIC = GREEDY | {"cache_implementation": "static"}
takes_static = pytest.mark.skipif(
    CACHE != "cache", reason="before 5.24, Transformers' assisted loop has no static cache"
)


@pytest.fixture
def native(monkeypatch):
    """A function that lets a target generate by Transformers' own loop with the candidates of a drafter."""
    hf_domino.uninstall()
    made = []

    def generate(target, drafter, ids, **options):
        def candidate_generator(**call):
            made.append(
                DominoCandidateGenerator(
                    drafter, target, call["generation_config"], call["logits_processor"], call["model_kwargs"]
                )
            )
            return made[-1]

        monkeypatch.setattr(target, "_get_candidate_generator", candidate_generator, raising=False)
        try:
            return target.generate(ids, assistant_model=drafter, **options)
        finally:
            monkeypatch.delattr(target, "_get_candidate_generator")

    generate.made = made
    yield generate
    hf_domino.install()


def drafter_of(method, target, make_drafter):
    return hf_domino.recycling(target) if method == RECYCLING else make_drafter(target, **EVERY[method])


@pytest.mark.parametrize("method", [*EVERY, RECYCLING])
def test_greedy_text_of_transformers_loop_is_plain_text(method, native, tiny_llama, make_drafter, forward_clock):
    drafter = drafter_of(method, tiny_llama, make_drafter)
    plain = tiny_llama.generate(PROMPT, **GREEDY)
    assert native(tiny_llama, drafter, PROMPT, **GREEDY).tolist() == plain.tolist()
    assert len(native.made) == 1
    assert drafter.stats.num_drafted > 1
    with faults(plain.tolist(), 64):  # all acceptance lengths occur
        assert native(tiny_llama, drafter, PROMPT, **GREEDY).tolist() == plain.tolist()
    assert len(set(drafter.stats.acceptance_lengths)) > 2


@pytest.mark.parametrize("method", ["domino", "eagle3"])
def test_proposals_are_those_of_the_own_loop(method, native, tiny_llama, make_drafter):
    """Both loops feed the same hidden states, so that drafts behind the same text are the same."""
    drafter = drafter_of(method, tiny_llama, make_drafter).view(draft_tree_size=None)
    with proposed() as by_transformers:
        native(tiny_llama, drafter, PROMPT, **GREEDY)
    hf_domino.install()
    with proposed() as by_own_loop:
        tiny_llama.generate(PROMPT, assistant_model=drafter, **GREEDY)
    assert by_transformers[:20] == by_own_loop[:20]
    assert len({tuple(tokens) for _, _, tokens in by_own_loop}) > 5


def test_end_of_text_padding_and_processors(native, tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3)
    text = tiny_qwen3.generate(PROMPT, **GREEDY)[0].tolist()
    ids = torch.nn.functional.pad(PROMPT, (4, 0), value=PAD)
    mask = (torch.arange(ids.shape[1])[None] >= 4).long()
    for options in (
        {"eos_token_id": text[25]},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
        {"prompt_lookup_num_tokens": 6},
        {"max_new_tokens": 1},
        {"num_assistant_tokens": 2},
    ):
        options = GREEDY | {"attention_mask": mask} | options
        plain = {name: value for name, value in options.items() if "num_" not in name}
        plain |= {"no_repeat_ngram_size": options.get("no_repeat_ngram_size")}
        expected = tiny_qwen3.generate(ids, **plain).tolist()
        assert native(tiny_qwen3, drafter, ids, **options).tolist() == expected


@pytest.mark.slow
def test_sampled_text_of_transformers_loop_has_the_targets_distribution(native, twelve_tokens, make_drafter):  # noqa: F811
    drafter = make_drafter(twelve_tokens, block_size=4, num_hidden_layers=1)
    options = {"do_sample": True, "top_k": 5, "temperature": 0.7, "max_new_tokens": 4}
    counts, accepted = torch.zeros(VOCAB * VOCAB), set()
    torch.manual_seed(11)
    for _ in range(600):
        tokens = native(twelve_tokens, drafter, SHORT_PROMPT, **options)[0, SHORT_PROMPT.shape[1] :]
        counts[tokens[1] * VOCAB + tokens[2]] += 1
        accepted |= set(drafter.stats.acceptance_lengths)
    assert {1, 2} <= accepted
    assert p_value(counts, exact_law(twelve_tokens, 5, 0.7).double()) > P_VALUE


def test_a_batch_is_refused_by_name(native, tiny_qwen3, make_drafter):
    generator = DominoCandidateGenerator(make_drafter(tiny_qwen3), tiny_qwen3, tiny_qwen3.generation_config)
    with pytest.raises(ValueError, match="batch size of get_candidates must be 1, got 2"):
        generator.get_candidates(PROMPT.repeat(2, 1), {}, None, True, 0)


def test_what_is_no_drafter_or_does_not_fit_is_refused_by_name(tiny_qwen3, tiny_llama, make_drafter):
    with pytest.raises(ValueError, match="assistant_model must be a DominoDraftModel, got 'LlamaForCausalLM'"):
        DominoCandidateGenerator(tiny_llama, tiny_qwen3, tiny_qwen3.generation_config)
    wide = make_drafter(tiny_qwen3, num_target_layers=9, target_layer_ids=[7])
    with pytest.raises(ValueError, match="num_target_layers"):
        DominoCandidateGenerator(wide, tiny_qwen3, tiny_qwen3.generation_config)


def test_before_the_first_forward_there_are_no_candidates(tiny_qwen3, make_drafter):
    generator = DominoCandidateGenerator(make_drafter(tiny_qwen3), tiny_qwen3, tiny_qwen3.generation_config)
    candidates, logits = generator.get_candidates(PROMPT, {}, None, True, 0)
    assert candidates is PROMPT
    assert logits is None
    assert generator.model_kwargs_overrides["output_hidden_states"]


def test_hidden_states_and_statistics_of_transformers_loop(native, tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3)
    options = GREEDY | {"return_dict_in_generate": True, "output_hidden_states": True}
    plain = tiny_qwen3.generate(PROMPT, **options)
    found = native(tiny_qwen3, drafter, PROMPT, **options)
    assert found.sequences.tolist() == plain.sequences.tolist()
    assert len(found.hidden_states) == len(plain.hidden_states)
    assert drafter.stats.num_new_tokens == 40
    assert drafter.stats.seconds > 0
    native(tiny_qwen3, drafter, PROMPT, **GREEDY | {"max_new_tokens": 1})
    assert drafter.stats.num_new_tokens == 1


def test_embeddings_alone_are_refused_by_name(native, tiny_qwen3, make_drafter):
    embeds = tiny_qwen3.get_input_embeddings()(PROMPT)
    with pytest.raises(ValueError, match="prompt of get_candidates must be of token ids"):
        native(tiny_qwen3, make_drafter(tiny_qwen3), None, inputs_embeds=embeds, **GREEDY)


@takes_static
@pytest.mark.parametrize("method", [*EVERY, RECYCLING])
def test_no_candidate_is_proposed_beyond_the_end_of_a_static_cache(method, native, tiny_llama, make_drafter):
    """Its slots are as many as the text has positions."""
    drafter = drafter_of(method, tiny_llama, make_drafter)
    whole = tiny_llama.generate(PROMPT, **GREEDY)
    for count in range(1, 17):
        with faults(whole.tolist(), 64):
            text = native(tiny_llama, drafter, PROMPT, **STATIC | {"max_new_tokens": count})
        assert text.tolist() == whole[:, : PROMPT.shape[1] + count].tolist()
        assert drafter.stats.num_new_tokens == count


@takes_static
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "qwen3", "mistral", "lfm2", "gemma4_text"])
def test_a_static_cache_of_transformers_writes_plain_text_or_is_refused_by_name(family, native, make_drafter):
    """A window of a static cache forgets what it would need to be rewound, unless the text is shorter."""
    target = families.build(family)
    drafter = make_drafter(target)
    for count in (families.WINDOW - PROMPT.shape[1], 20):
        plain = target.generate(PROMPT, **GREEDY | {"max_new_tokens": count})
        has_windows = "sliding_attention" in getattr(target.config, "layer_types", []) or family == "mistral"
        if count == 20 and has_windows:
            with pytest.raises(
                ValueError, match=f"layers of {CACHE} must be .* got 'StaticSlidingWindowLayer'. .* unset"
            ):
                native(target, drafter, PROMPT, **STATIC | {"max_new_tokens": count})
        else:
            with faults(plain.tolist(), families.VOCAB_SIZE):
                text = native(target, drafter, PROMPT, **STATIC | {"max_new_tokens": count})
            assert text.tolist() == plain.tolist()


@takes_static
@pytest.mark.parametrize("method", ["domino", "eagle3"])
def test_drafts_read_the_same_states_from_a_compiled_target(method, native, make_drafter):
    """On a GPU, Transformers compiles the target of a call with a static cache by itself."""
    target = LlamaForCausalLM(LlamaConfig(**(TINY | {"num_hidden_layers": 2}))).eval()  # each is traced, which is slow
    drafter = drafter_of(method, target, make_drafter).view(draft_tree_size=None)
    compiled = CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True
    plain = target.generate(PROMPT, **GREEDY)
    found = []
    for options in (GREEDY, STATIC, STATIC | {"compile_config": compiled}):
        with proposed() as proposals:
            assert native(target, drafter, PROMPT, **options).tolist() == plain.tolist()
        found.append(proposals[:20])
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for _, _, tokens in found[0]}) > 5


def test_states_that_the_next_forward_overwrites(native, tiny_llama, make_drafter, monkeypatch, forward_clock):
    """The graphs of a compiled target write their outputs to the same memory in every forward."""
    drafter = make_drafter(tiny_llama, draft_length="adaptive")
    options = GREEDY | {
        "prompt_lookup_num_tokens": 4
    }  # rounds without drafts leave states that wait for the next draft
    memory = {}
    forward = type(tiny_llama).forward

    def overwrite(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        states = [value for value in outputs.hidden_states or () if value is not None]
        held = memory.setdefault(states[-1].shape if states else None, [value.clone() for value in states])
        for place, value in zip(held, states, strict=True):
            place.copy_(value)
        taken = iter(held)
        if outputs.hidden_states:
            outputs.hidden_states = tuple(None if value is None else next(taken) for value in outputs.hidden_states)
        return outputs

    with proposed() as expected:
        native(tiny_llama, drafter, PROMPT, **options)
    monkeypatch.setattr(type(tiny_llama), "forward", functools.wraps(forward)(overwrite))
    drafter = make_drafter(tiny_llama, draft_length="adaptive")
    with proposed() as found:
        native(tiny_llama, drafter, PROMPT, **options)
    assert found == expected
    assert len(found) < len(drafter.stats.acceptance_lengths)


def test_a_memory_holds_what_transformers_loop_writes(native, tiny_qwen3, make_drafter):
    """Without the padding before the prompt, and also if a call makes no round."""
    drafter = make_drafter(tiny_qwen3)
    drafter.memory = hf_domino.LookupMemory()
    ids = torch.nn.functional.pad(PROMPT, (4, 0), value=PAD)
    options = GREEDY | {"attention_mask": (torch.arange(ids.shape[1])[None] >= 4).long()}
    plain = tiny_qwen3.generate(ids, **options)
    for _ in range(2):
        assert torch.equal(native(tiny_qwen3, drafter, ids, **options), plain)
    assert len(drafter.memory) == PROMPT.shape[1] + 40 + 39  # the prompt and the first token are held once
    drafter.memory.add(plain[0, 4:])
    assert len(drafter.memory) == PROMPT.shape[1] + 40 + 39
    assert drafter.stats.lookup_length > 3
    native(tiny_qwen3, drafter, torch.tensor([[60, 61]]), **GREEDY | {"max_new_tokens": 1})
    assert len(drafter.memory) == PROMPT.shape[1] + 40 + 39 + 3

"""`DominoCandidateGenerator`, driven by Transformers' own assisted loop, without the patch."""

from __future__ import annotations

import pytest
import torch
from builders import PAD
from oracle import faults, proposed
from test_sampling_distribution import P_VALUE, VOCAB, exact_law, p_value
from test_sampling_distribution import PROMPT as SHORT_PROMPT
from test_sampling_distribution import target as twelve_tokens  # noqa: F401, a fixture

import hf_domino
from hf_domino import DominoCandidateGenerator

PROMPT = torch.arange(7, 19)[None]
GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": PAD, "eos_token_id": -1}
METHODS = {
    "domino": {},
    "domino behind the anchor": {"shift_label": False},
    "dflash": {"projector_type": "dflash"},
    "dspark": {"projector_type": "dspark", "markov_head_type": "gated", "markov_rank": 8},
    "dflash2": {"projector_type": "dflash2", "selector_rank": 8, "selector_top_k": 8, "conv_kernel_size": 2},
    "eagle3": {"projector_type": "eagle3"},
}


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
        output = target.generate(ids, assistant_model=drafter, **options)
        monkeypatch.delattr(target, "_get_candidate_generator")
        return output

    generate.made = made
    yield generate
    hf_domino.install()


def drafter_of(method, target, make_drafter):
    return hf_domino.recycling(target) if method == "recycling" else make_drafter(target, **METHODS[method])


@pytest.mark.parametrize("method", [*METHODS, "recycling"])
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

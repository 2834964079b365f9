"""A kind without weights: what it refuses, and how it goes with conversations, copies and offloaded targets."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from calls_of_methods import PROMPTS, SAMPLED, calls, generate

import hf_domino
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer


@pytest.fixture
def drafter(wide):
    return hf_domino.recycling(wide, draft_length="full").double()


def test_a_second_turn_and_a_rewound_cache_write_plain_text(wide, drafter):
    first = generate(wide, drafter, PROMPTS[0][None], return_dict_in_generate=True)
    kept = copy.deepcopy(first.past_key_values)
    kept.crop(-9)
    for cache, length in ((first.past_key_values, 100), (kept, kept.get_seq_length())):
        for options in ({}, SAMPLED):
            ids = torch.cat((first.sequences[:, :length], PROMPTS[1][None]), dim=1)
            past = copy.deepcopy(cache)
            found = generate(wide, drafter, ids, past_key_values=past, **options)
            assert torch.equal(found, generate(wide, None, ids, **options))


def test_it_copies_from_the_text_too(wide, drafter):
    ids = torch.arange(5, 15).repeat(3)[None]
    found = generate(wide, drafter.view(draft_length="adaptive"), ids, prompt_lookup_num_tokens=5)
    assert torch.equal(found, generate(wide, None, ids))


def test_it_serves_a_pacer_and_processors(wide, drafter):
    ids, options = calls(3)
    for more in ({"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, SAMPLED | {"top_p": 0.8}):
        found = generate(wide, drafter.view(draft_length="adaptive"), ids, **options, **more)
        assert torch.equal(found, generate(wide, None, ids, **options, **more))


@pytest.mark.parametrize(
    ("use", "feature"),
    [
        (lambda drafter, target, folder: drafter.save_pretrained(folder), "save_pretrained"),
        (lambda drafter, target, folder: drafter.export(folder), "export"),
        (lambda drafter, target, folder: hf_domino.check_fit(drafter, target), "check_fit"),
        (lambda drafter, target, folder: hf_domino.explain_round(drafter, target, PROMPTS[0][None]), "explain_round"),
        (
            lambda drafter, target, folder: DominoTrainer(
                drafter, target, DominoTrainingArguments(str(folder), report_to="none", use_cpu=True)
            ),
            "training",
        ),
    ],
)
def test_what_it_lacks_is_refused_by_name(wide, drafter, tmp_path, use, feature):
    title = drafter.config.title
    with pytest.raises(ValueError, match=f"the drafter's method with {feature} must be .*got '{title}'"):
        use(drafter, wide, tmp_path / "out")


def test_the_command_does_not_train_it(recipe, train, capsys):
    fields = {name: value for name, value in recipe.items() if name not in ("num_hidden_layers", "shift_label")}
    assert train(fields | {"projector_type": "recycling"}) == 2
    assert "the drafter's method with training must be" in capsys.readouterr().err


def test_what_it_cannot_be_made_of_is_refused(wide):
    for other in (wide.config, "Qwen/Qwen3-8B", hf_domino.recycling(wide)):
        with pytest.raises(ValueError, match=f"target must be a causal language model, got '{type(other).__name__}'"):
            hf_domino.recycling(other)
    with pytest.raises(ValueError, match="window must be a field of DominoConfig, got none of that name"):
        hf_domino.recycling(wide, window=3)


def test_it_drafts_for_an_offloaded_target_and_in_inference_mode(wide):
    offloaded, ids = accelerate.cpu_offload(copy.deepcopy(wide), execution_device="cpu"), PROMPTS[0][None]
    with torch.inference_mode():
        drafter = hf_domino.recycling(offloaded)
    assert torch.equal(generate(offloaded, drafter, ids), generate(wide, None, ids))


def test_padding_is_no_text_where_ids_are_of_the_last_positions_or_of_none(wide, drafter):
    ids = torch.cat((torch.full((1, 8), 2), PROMPTS[0][None]), dim=1)
    mask = (torch.arange(20) >= 8).long()[None]
    first = generate(wide, drafter, ids, attention_mask=mask, return_dict_in_generate=True)
    new, mask = PROMPTS[1][None, :2], torch.nn.functional.pad(mask, (0, first.sequences.shape[1] - 20 + 1), value=1)
    plain = generate(wide, None, new, attention_mask=mask, past_key_values=copy.deepcopy(first.past_key_values))
    found = generate(wide, drafter, new, attention_mask=mask, past_key_values=first.past_key_values)
    assert torch.equal(found, plain)
    embedded = wide.get_input_embeddings()(ids)
    options = {"inputs_embeds": embedded, "attention_mask": (torch.arange(20) >= 8).long()[None]}
    assert torch.equal(generate(wide, drafter, None, **options), generate(wide, None, None, **options))

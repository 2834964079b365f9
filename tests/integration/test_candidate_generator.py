"""The adapter speaks Transformers' `CandidateGenerator` protocol and drafts what our own loop drafts."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.stopping import KnownStops
from hf_domino.integration.candidate_generator import DominoCandidateGenerator
from hf_domino.target.view import TargetModel

PROMPT = torch.tensor([[5, 9, 33, 20, 7]])


def generator(target, drafter, **options):
    config = GenerationConfig(**({"max_length": 64, "do_sample": False} | options))
    return DominoCandidateGenerator(drafter, target, config, LogitsProcessorList(), PROMPT.shape[1])


def run_target(target, candidates, ids):
    return target(ids, **candidates.model_kwargs_overrides)


@torch.no_grad()
def draft(target, candidates, prompt=PROMPT, mask=None):
    """The candidates of the first real round: the prompt has been run and an anchor committed."""
    ids, scores = candidates.get_candidates(prompt, model_kwargs={}, model_outputs=None, is_first_iteration=True)
    assert ids is prompt
    assert scores is None
    outputs = target(prompt, attention_mask=mask, **candidates.model_kwargs_overrides)
    ids = torch.cat((prompt, outputs.logits[:, -1:].argmax(dim=-1)), dim=1)
    model_kwargs = {"attention_mask": None if mask is None else torch.cat((mask, mask[:, -1:]), dim=1)}
    kwargs = {"model_kwargs": model_kwargs, "model_outputs": outputs, "is_first_iteration": False, "n_last_matches": 0}
    return ids, *candidates.get_candidates(ids, **kwargs)


@pytest.mark.parametrize("shift_label", [True, False])
def test_candidates_follow_the_committed_tokens(tiny_qwen3, make_drafter, shift_label):
    drafter = make_drafter(tiny_qwen3, shift_label=shift_label)
    ids, candidates, scores = draft(tiny_qwen3, generator(tiny_qwen3, drafter))
    assert torch.equal(candidates[:, : ids.shape[1]], ids)
    assert candidates.shape[1] - ids.shape[1] == drafter.config.num_draft_tokens
    assert scores is None  # greedy: drafts are certain


def test_candidates_of_the_residual_rule_come_with_their_law(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3, acceptance_rule="residual")
    ids, candidates, scores = draft(tiny_qwen3, generator(tiny_qwen3, drafter, do_sample=True))
    assert scores.shape == (1, candidates.shape[1] - ids.shape[1], tiny_qwen3.config.vocab_size)
    assert scores.gather(2, candidates[:, ids.shape[1] :, None]).isfinite().all()


def test_greedy_candidates_of_the_residual_rule_are_certain(tiny_qwen3, make_drafter):
    drafter = make_drafter(tiny_qwen3, acceptance_rule="residual", draft_law="greedy")
    assert draft(tiny_qwen3, generator(tiny_qwen3, drafter, do_sample=True))[2] is None


def test_what_is_drawn_in_that_loop_is_forced(tiny_qwen3, tiny_drafter):
    """A processor behind all others leaves one token, that of the step's noise; the scores are uncovered again."""
    config, processors = GenerationConfig(max_length=64, do_sample=True), LogitsProcessorList()
    steps, ids, forced = 2 * torch.randn(1, 4, 64), PROMPT, []
    torch.manual_seed(3)
    candidates = DominoCandidateGenerator(tiny_drafter, tiny_qwen3, config, processors, PROMPT.shape[1])
    candidates.get_candidates(ids, is_first_iteration=True)
    for step in range(4):
        forced.append(processors(ids, steps[:, step].clone()))
        assert forced[-1].isfinite().sum() == 1
        ids = torch.cat((ids, forced[-1].argmax(dim=-1, keepdim=True)), dim=1)
        candidates.update_candidate_strategy(ids, forced[-1][:, None], 0)
        assert torch.equal(forced[-1], steps[:, step])
        processors[0].begin_round(ids.shape[1])
        candidates._rule.begin_round(Prefixes.of(ids), 2)  # more than one step ahead
    del candidates
    left_at = torch.get_rng_state()
    torch.manual_seed(3)
    drawn = [torch.multinomial(steps[:, step].softmax(-1), 1) for step in range(4)]
    assert torch.equal(torch.cat((PROMPT, *drawn), dim=1), ids)
    assert torch.equal(torch.get_rng_state(), left_at)


@pytest.mark.parametrize(("max_length", "expected"), [(7, 0), (8, 1), (9, 2), (64, 6)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_candidates_leave_room_for_the_bonus_token(tiny_qwen3, tiny_drafter, max_length, expected, do_sample):
    candidates = generator(tiny_qwen3, tiny_drafter, max_length=max_length, do_sample=do_sample)
    ids, drafted, scores = draft(tiny_qwen3, candidates)
    assert drafted.shape[1] - ids.shape[1] == expected
    assert scores is None


def test_candidates_end_before_end_of_text(tiny_qwen3, tiny_drafter):
    ids, candidates, _ = draft(tiny_qwen3, generator(tiny_qwen3, tiny_drafter))
    drafted = candidates[0, ids.shape[1] :].tolist()
    ending = generator(tiny_qwen3, tiny_drafter)
    ending._stops = KnownStops(frozenset({drafted[2]}), 64)
    ids, candidates, _ = draft(tiny_qwen3, ending)
    assert candidates[0, ids.shape[1] :].tolist() == drafted[: drafted.index(drafted[2])]


def test_left_padding_is_not_read(tiny_qwen3, tiny_drafter):
    ids, candidates, _ = draft(tiny_qwen3, generator(tiny_qwen3, tiny_drafter))
    padded, mask = torch.cat((torch.full((1, 3), 2), PROMPT), dim=1), torch.tensor([[0] * 3 + [1] * PROMPT.shape[1]])
    padded_ids, padded_candidates, _ = draft(tiny_qwen3, generator(tiny_qwen3, tiny_drafter), padded, mask)
    assert torch.equal(padded_candidates[:, padded_ids.shape[1] :], candidates[:, ids.shape[1] :])


def test_only_needed_layers_are_captured(tiny_qwen3, tiny_drafter):
    outputs = run_target(tiny_qwen3, generator(tiny_qwen3, tiny_drafter), PROMPT)
    captured = [entry for entry in outputs.hidden_states if entry is not None]
    assert len(captured) == len(tiny_drafter.config.target_layer_ids)


@torch.no_grad()
@pytest.mark.parametrize("layer_ids", [[0, 2], [1], [2, 0]])
def test_captured_layers_are_the_right_ones(tiny_qwen3, make_drafter, layer_ids):
    view = TargetModel(tiny_qwen3, make_drafter(tiny_qwen3, target_layer_ids=layer_ids).config)
    recorded = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, output, i=i: recorded.__setitem__(i, output))
        for i, layer in enumerate(tiny_qwen3.model.layers)
    ]
    captured = view.captured(tiny_qwen3(PROMPT, **view.capture_kwargs()))
    [hook.remove() for hook in hooks]
    assert len(captured) == len(layer_ids)
    for states, layer_id in zip(captured, layer_ids, strict=True):
        assert torch.equal(states, recorded[layer_id])

"""Drift watching: silent where all is well, loud where verification is not what the target says alone."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from builders import PAD
from oracle import oracle
from recorder import Recorder
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
)

import hf_domino
from hf_domino.decoding.runner import TargetRunner
from hf_domino.integration import assisted_call, replay

PROMPT = torch.tensor([[5, 9, 33, 20, 7, 41]])
BATCH = torch.tensor([[PAD, PAD, 33, 20, 7, 41], [5, 9, 11, 20, 7, 12], [PAD, 8, 30, 31, 32, 33]])
MASK = (BATCH != PAD).long()
NEW_TOKENS = 20
EDGE_SEED = 8  # whose noise leaves the likeliest of four tokens behind the last two


def generate(target, drafter, prompt=PROMPT, **kwargs):
    arguments = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": -1} | kwargs
    return target.generate(prompt, assistant_model=drafter, **arguments)


@pytest.fixture
def perturb(monkeypatch):
    """Add to the logits of one position of every verification forward."""

    def change(amount, position=0):
        check_block = TargetRunner.check_block

        def perturbed(self, anchors, proposed):
            logits, captured = check_block(self, anchors, proposed)
            logits = logits.clone()
            second = logits[:, position].topk(2).indices[:, 1:]
            logits[:, position] = logits[:, position].scatter_add(1, second, torch.full(second.shape, amount))
            return logits, captured

        monkeypatch.setattr(TargetRunner, "check_block", perturbed)

    return change


# --- all is well ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accuracy", [0.0, 0.8])
def test_greedy_calls_agree(tiny_qwen3, tiny_drafter, accuracy):
    with (
        oracle(tiny_qwen3, PROMPT, accuracy, do_sample=False, max_new_tokens=NEW_TOKENS),
        hf_domino.shadow() as report,
    ):
        generate(tiny_qwen3, tiny_drafter)
    assert (report.num_calls, report.num_tokens, report.mismatches) == (1, NEW_TOKENS, [])
    assert str(report) == f"{NEW_TOKENS} tokens compared in 1 calls, mismatches: 0, of which no tie 0"


def test_batches_with_padding_and_early_ends(tiny_qwen3, tiny_drafter):
    plain = tiny_qwen3.generate(
        BATCH, attention_mask=MASK, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=PAD
    )
    first = plain[:, BATCH.shape[1]].tolist()
    eos = next(token for token in plain[0, BATCH.shape[1] :].tolist() if token not in first)
    arguments = {"attention_mask": MASK, "eos_token_id": eos, "pad_token_id": PAD}
    with hf_domino.shadow() as report:
        output = generate(tiny_qwen3, tiny_drafter, BATCH, **arguments)
    assert (output[:, BATCH.shape[1] :] == PAD).any(), "no row ended early: the test tests nothing"
    assert report.mismatches == []
    real = sum(row.index(eos) + 1 if eos in row else len(row) for row in output[:, BATCH.shape[1] :].tolist())
    assert report.num_tokens == real


@pytest.mark.parametrize("batch", [False, True])
def test_sampled_calls_are_compared_at_their_seed(tiny_qwen3, tiny_drafter, batch):
    law = {"do_sample": True, "temperature": 1.3, "top_k": 20}
    inputs = {"prompt": BATCH, "attention_mask": MASK, "pad_token_id": PAD} if batch else {}
    with hf_domino.shadow() as report:
        generate(tiny_qwen3, tiny_drafter, **inputs, **law)
    assert report.mismatches == []
    assert report.num_tokens == NEW_TOKENS * (3 if batch else 1)


def test_a_sampled_mismatch_is_seen(tiny_qwen3, tiny_drafter, perturb):
    perturb(20.0)  # the second likeliest wins almost every race
    with hf_domino.shadow() as report:
        generate(tiny_qwen3, tiny_drafter, do_sample=True, temperature=1.3, top_k=20)
    assert report.suspicious


def test_tokens_of_the_residual_rule_are_not_compared(tiny_qwen3, tiny_drafter):
    with hf_domino.shadow() as report:
        generate(tiny_qwen3, tiny_drafter.view(acceptance_rule="residual"), do_sample=True, temperature=1.3, top_k=20)
    assert (report.num_calls, report.num_tokens, report.mismatches) == (1, 0, [])


@pytest.mark.parametrize(("verified", "margin"), [([0.0, 1.0, 0.5, 0.6], 0.125), ([0.0, 1.0, 0.7, 0.6], torch.inf)])
def test_a_token_on_the_edge_of_a_warper_is_as_far_off_as_the_logits(verified, margin):
    """Of two tokens at the edge of top-k, one is forbidden: for a reason only if verification kept the other."""
    ids, alone = torch.tensor([[9]]), torch.tensor([[0.0, 1.0, 0.625, 0.6]])
    target = SimpleNamespace(
        _sample=lambda ids, processors, *args, **kwargs: processors(ids, alone), dtype=torch.float32, device=ids.device
    )
    call = replay.Replay(
        target, ids, LogitsProcessorList([TopKLogitsWarper(2)]), [MaxLengthCriteria(2)], GenerationConfig()
    )
    call.run(torch.tensor([[9, 3]]), [torch.tensor([verified])], torch.Generator().manual_seed(EDGE_SEED))
    ((_, mismatch),) = call.rows(0)
    assert (mismatch.token, mismatch.expected, mismatch.margin) == (3, 2, margin)


class Alternating(LogitsProcessor):
    """Forbids another token at every call: it keeps state, so a replay needs its own."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, torch.tensor([10 + self.calls % 40]), -torch.inf)


def test_processors_of_the_call(tiny_qwen3, tiny_drafter):
    processor = Alternating()
    with hf_domino.shadow() as report:
        generate(tiny_qwen3, tiny_drafter, logits_processor=[processor], repetition_penalty=1.3, no_repeat_ngram_size=2)
    assert (report.mismatches, report.num_tokens) == ([], NEW_TOKENS)
    assert processor.calls == NEW_TOKENS


class StopsAfter(StoppingCriteria):
    """Stops at a length: a criterion that a replay cannot know."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= PROMPT.shape[1] + 7)


def test_stopping_criteria_of_the_user(tiny_qwen3, tiny_drafter):
    with hf_domino.shadow() as report:
        generate(tiny_qwen3, tiny_drafter, stopping_criteria=[StopsAfter()])
    assert (report.mismatches, report.num_tokens) == ([], 7)


def test_stop_strings(tiny_qwen3, tiny_drafter, tiny_tokenizer):
    plain = tiny_tokenizer.decode(generate(tiny_qwen3, tiny_drafter)[0, PROMPT.shape[1] :])
    arguments = {"stop_strings": [plain[8:11]], "tokenizer": tiny_tokenizer}
    with hf_domino.shadow() as report:
        output = generate(tiny_qwen3, tiny_drafter, **arguments)
    assert output.shape[1] < PROMPT.shape[1] + NEW_TOKENS
    assert report.mismatches == []


def test_prompt_of_embeddings(tiny_qwen3, tiny_drafter):
    embeds = tiny_qwen3.get_input_embeddings()(PROMPT)
    with hf_domino.shadow() as report:
        generate(tiny_qwen3, tiny_drafter, None, inputs_embeds=embeds)
    assert (report.mismatches, report.num_tokens) == ([], NEW_TOKENS)


# --- nothing is disturbed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("do_sample", [False, True])
def test_result_random_state_and_streamer(tiny_qwen3, tiny_drafter, do_sample):
    seen = []
    for watch in (nullcontext, hf_domino.shadow):
        torch.manual_seed(3)
        streamer = Recorder()
        with watch():
            output = generate(tiny_qwen3, tiny_drafter, do_sample=do_sample, streamer=streamer)
        seen.append((output.tolist(), streamer.tokens, torch.get_rng_state().tolist(), tiny_drafter.stats.rows))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("field", ["output_scores", "output_logits"])
def test_returned_dictionary_and_cache(tiny_qwen3, tiny_drafter, field):
    outputs = []
    for watch in (nullcontext, hf_domino.shadow):
        cache = DynamicCache()
        with watch():
            output = generate(
                tiny_qwen3, tiny_drafter, past_key_values=cache, return_dict_in_generate=True, **{field: True}
            )
        assert output.past_key_values is cache
        outputs.append(output)
    assert set(outputs[0].keys()) == set(outputs[1].keys())
    found = [torch.stack(output[field.removeprefix("output_")]) for output in outputs]
    assert torch.equal(*found)
    keys = [output.past_key_values.layers[0].keys for output in outputs]
    assert torch.equal(*keys)


def test_conversation_that_goes_on(tiny_qwen3, tiny_drafter):
    cache = DynamicCache()
    with hf_domino.shadow() as report:
        first = generate(tiny_qwen3, tiny_drafter, past_key_values=cache, max_new_tokens=8)
        longer = torch.cat((first, torch.tensor([[14, 15]])), dim=1)
        generate(tiny_qwen3, tiny_drafter, longer, past_key_values=cache)
    assert report.mismatches == []
    assert report.num_tokens == 8 + NEW_TOKENS


# --- all is not well --------------------------------------------------------------------------------------------


def test_wrong_token_is_reported_with_its_margin(tiny_qwen3, tiny_drafter, perturb):
    plain = generate(tiny_qwen3, None)
    perturb(20.0)
    with hf_domino.shadow() as report:
        output = generate(tiny_qwen3, tiny_drafter)
    (mismatch,) = report.mismatches
    position = (plain != output).nonzero()[0, 1].item()
    assert mismatch.position == position - PROMPT.shape[1]
    assert (mismatch.token, mismatch.expected) == (output[0, position].item(), plain[0, position].item())
    logits = tiny_qwen3(output[:, :position]).logits[0, -1]
    assert mismatch.margin == pytest.approx((logits[mismatch.expected] - logits[mismatch.token]).item(), rel=1e-3)
    assert not mismatch.is_tie
    assert report.suspicious == [mismatch]
    assert "NO TIE" in str(report)


def test_wrong_rows_of_a_batch_are_told_apart(tiny_qwen3, tiny_drafter, perturb):
    perturb(20.0)
    with hf_domino.shadow() as report:
        generate(tiny_qwen3, tiny_drafter, BATCH, attention_mask=MASK, pad_token_id=PAD)
    assert [mismatch.row for mismatch in report.mismatches] == [0, 1, 2]


@pytest.fixture
def stop_elsewhere(monkeypatch):
    """Let assisted texts stop at another length than the call asks for, which the report does not know."""
    decode = assisted_call.assisted_decoding

    def stop(length):
        criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
        monkeypatch.setattr(
            assisted_call,
            "assisted_decoding",
            lambda *args, **kwargs: decode(*args, **kwargs | {"stopping_criteria": criteria}),
        )

    return stop


def test_text_that_goes_on_behind_its_end(tiny_qwen3, tiny_drafter, stop_elsewhere):
    output = generate(tiny_qwen3, tiny_drafter)
    eos = output[0, PROMPT.shape[1] + 9].item()
    stop_elsewhere(output.shape[1])
    with hf_domino.shadow() as report:
        assert torch.equal(generate(tiny_qwen3, tiny_drafter, eos_token_id=eos), output)
    (mismatch,) = report.mismatches
    assert mismatch.expected is None
    assert mismatch.position <= 10
    assert "the target alone has stopped" in str(mismatch)


def test_text_that_ends_too_early(tiny_qwen3, tiny_drafter, stop_elsewhere):
    stop_elsewhere(PROMPT.shape[1] + 5)
    with hf_domino.shadow() as report:
        generate(tiny_qwen3, tiny_drafter)
    (mismatch,) = report.mismatches
    assert (mismatch.position, mismatch.token, mismatch.margin) == (5, None, float("inf"))
    assert "goes on" in str(mismatch)


@pytest.mark.parametrize("is_autocast", [False, True])
def test_bf16_differences_are_ties(tiny_qwen3, tiny_drafter, is_autocast):
    target, drafter = copy.deepcopy(tiny_qwen3), copy.deepcopy(tiny_drafter)
    if not is_autocast:
        target, drafter = target.bfloat16(), drafter.bfloat16()
    with hf_domino.shadow() as report, torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        for token in (8,) if is_autocast else range(4, 8):
            generate(target, drafter, torch.tensor([[token, 9, 33]]), max_new_tokens=60)
    assert report.mismatches, "bf16 without a near-tie tests nothing"
    assert report.mismatches[0].tie > 0.01  # in fp32 it would be a millionth
    assert report.suspicious == []

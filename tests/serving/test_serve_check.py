"""What a check makes of texts and rounds, and what both sides are asked for."""

import pytest
import torch
from builders import build_drafter
from transformers import GenerationConfig

from hf_domino.pair import Pair
from hf_domino.serving.check import Leg, ServeCheck
from hf_domino.serving.client import Answers
from hf_domino.serving.reference import reference
from hf_domino.serving.run import Serving, check_server

TEXTS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def leg(name, rounds=0, texts=TEXTS, at_once=1, accepted=(), seconds=2.0):
    return Leg(name, at_once, Answers(texts, seconds, rounds, accepted))


def check(*served, dtype="float32", control=TEXTS):
    plain, ours = leg("Transformers"), leg("ours", 100, accepted=(60, 30))
    alone = tuple(leg("vLLM", texts=control, at_once=other.at_once) for other in served)
    return ServeCheck(dtype, plain, ours, alone, served)


def test_a_server_that_drafts_as_we_do():
    found = check(leg("served", 102, accepted=(60, 30)), leg("served", 99, at_once=8, accepted=(61, 30)))
    assert found.faults == ()
    assert "The server drafts as we do." in str(found)
    assert [row["acceptance_length"] for row in found.rows()] == [None, 1.9, None, None, 1 + 90 / 102, 1 + 91 / 99]
    assert found.rows()[4]["tokens_per_second"] == 4
    assert found.slower == ()


def test_a_drafter_that_slows_a_busy_server_is_said_to():
    found = check(leg("served", 100, seconds=1.0), leg("served", 100, at_once=8, seconds=4.0))
    assert found.slower == ("With 8 at once the drafter slows the server: 2 tokens/s, 4 without.",)
    assert str(found).endswith(found.slower[0])
    assert found.faults == ()


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (leg("served", 103), "needed 103 rounds, we 100"),
        (leg("served", 0), "nothing was drafted"),
        (leg("served", 100, [[1, 2, 3, 9], TEXTS[1]], 8), "With 8 at once 1 of 2 texts are those of Transformers"),
    ],
)
def test_faults_are_said(served, said):
    found = check(leg("served", 100), served)
    assert len(found.faults) == 1
    assert said in found.faults[0]
    assert found.faults[0] in str(found)


def test_narrow_floats_are_shown_and_not_judged():
    other = [[1, 2, 3, 9], TEXTS[1]]
    found = check(leg("served", 150, other), dtype="bfloat16", control=other)
    assert found.faults == ()
    assert "Texts and rounds are judged in float32." in str(found)
    assert [found.rows()[3][f"equal_to_{name}"] for name in ("transformers", "server")] == [1, 2]


@pytest.fixture
def pair(tiny_qwen3, tiny_tokenizer, tmp_path):
    import copy

    target = copy.deepcopy(tiny_qwen3)
    target.generation_config = GenerationConfig(eos_token_id=list(range(60)), repetition_penalty=1.7, pad_token_id=2)
    return Pair("tiny", tmp_path, target, tiny_tokenizer, build_drafter(target), None)


def test_the_reference_is_greedy_without_penalties_and_past_the_end(pair, tiny_qwen3):
    prompts = [[5, 6, 7], [9, 10]]
    plain = reference(pair, prompts, 12)
    ours = reference(pair, prompts, 12, num_proposals=3)
    assert plain.texts == ours.texts
    assert [len(text) for text in plain.texts] == [12, 12]
    logits = tiny_qwen3(torch.tensor([prompts[0] + plain.texts[0][:-1]])).logits[0, 2:]
    assert logits.argmax(dim=-1).tolist() == plain.texts[0]
    assert (plain.rounds, plain.acceptance_length) == (0, None)
    assert len(ours.accepted) == 3
    assert ours.rounds + sum(ours.accepted) == 2 * (12 - 1)  # the first token of each comes before its rounds


@pytest.mark.parametrize("count", [0, 6])
def test_proposals_that_do_not_fit_are_refused_before_anything_runs(pair, count):
    with pytest.raises(ValueError, match=rf"--num-proposals must be in \[1, 5\] \(block_size - 1\), got {count}"):
        check_server(pair, [{"text": "ab"}], Serving("python", "float32", count, 4, (1,)))

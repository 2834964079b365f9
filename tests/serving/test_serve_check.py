"""What a check makes of texts and rounds, and what both sides are asked for."""

import copy
import json
from contextlib import contextmanager

import pytest
import torch
import vllm_server
from builders import build_drafter
from transformers import GenerationConfig
from vllm_server import Leg, check_server, faults, reference, rows

from hf_domino.pair import Pair

TEXTS, OTHER = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 9], [5, 6, 7, 8]]
HOW = {"python": "python", "dtype": "float32", "max_new_tokens": 4, "at_once": (1, 2), "flags": ["--flag"]}


def leg(name, rounds=0, texts=TEXTS, at_once=1, accepted=()):
    return Leg(name, at_once, texts, 2.0, rounds, list(accepted))


def legs(*served, control=TEXTS):
    alone = [leg("vLLM", texts=control, at_once=other.at_once) for other in served]
    return [leg("Transformers"), leg("ours", 100, accepted=(60, 30)), *alone, *served]


def test_a_server_that_drafts_as_we_do():
    found = legs(leg("served", 102, accepted=(60, 30)), leg("served", 99, at_once=8, accepted=(61, 30)))
    assert faults(found, "float32") == []
    assert [row["acceptance_length"] for row in rows(found)] == [None, 1.9, None, None, 1 + 90 / 102, 1 + 91 / 99]
    assert (rows(found)[4]["tokens_per_second"], rows(found)[4]["texts"]) == (4, 2)


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (leg("served", 103), "needed 103 rounds, we 100"),
        (leg("served", 0), "nothing was drafted"),
        (leg("served", 100, OTHER, 8), "With 8 at once 1 of 2 texts are those of Transformers"),
    ],
)
def test_faults_are_said(served, said):
    found = legs(leg("served", 100), served)
    (fault,) = faults(found, "float32")
    assert said in fault


def test_narrow_floats_are_shown_and_not_judged():
    found = legs(leg("served", 150, OTHER), control=OTHER)
    assert faults(found, "bfloat16") == []
    assert [rows(found)[3][f"equal_to_{name}"] for name in ("transformers", "server")] == [1, 2]


@pytest.fixture
def pair(tiny_qwen3, tiny_tokenizer, tmp_path):
    target = copy.deepcopy(tiny_qwen3)
    target.generation_config = GenerationConfig(eos_token_id=list(range(60)), repetition_penalty=1.7, pad_token_id=2)
    return Pair("tiny", tmp_path, target, tiny_tokenizer, {"tiny (Domino)": build_drafter(target)})


def test_the_reference_is_greedy_without_penalties_and_past_the_end(pair, tiny_qwen3):
    prompts = [[5, 6, 7], [9, 10]]
    plain = reference(pair, prompts, 12)
    ours = reference(pair, prompts, 12, num_proposals=3)
    assert plain.texts == ours.texts
    assert [len(text) for text in plain.texts] == [12, 12]
    logits = tiny_qwen3(torch.tensor([prompts[0] + plain.texts[0][:-1]])).logits[0, 2:]
    assert logits.argmax(dim=-1).tolist() == plain.texts[0]
    assert (plain.rounds, len(ours.accepted)) == (0, 3)
    assert ours.rounds + sum(ours.accepted) == 2 * (12 - 1)  # the first token of each comes before its rounds


def test_a_server_is_started_without_the_drafter_and_with_it(pair, monkeypatch):
    started = []

    @contextmanager
    def serve(python, target, flags, log):
        started.append(flags)
        yield "url"

    monkeypatch.setattr(vllm_server, "serve", serve)
    monkeypatch.setattr(vllm_server, "ask", lambda url, ids, length, count=1, how="": leg(how, at_once=count))
    found = check_server(pair, [{"text": "ab"}], num_proposals=3, **HOW)
    names = ("", "", " with the drafter", " with the drafter")
    assert [(each.name, each.at_once) for each in found[2:]] == list(zip(names, (1, 2, 1, 2), strict=True))
    assert started[0] == ["--flag"]
    assert json.loads(started[1][-1])["num_speculative_tokens"] == 3

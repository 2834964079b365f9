"""Trees where the models are on a device other than a CPU."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from builders import build_drafter, left_padded
from elsewhere import Elsewhere, elsewhere, move

import hf_domino
from hf_domino.decoding import policy, support

PROMPTS = [torch.arange(7, 13).repeat(3), torch.arange(30, 37)]
STATIC, COPYING = {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 8}
DRAWN = {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3}


@pytest.mark.parametrize(
    ("num_rows", "tree_size", "draft_length", "distribution", "options"),
    [
        (1, 12, "adaptive", DRAWN, STATIC),
        (1, "adaptive", "adaptive", {}, COPYING),
        (1, 12, "full", {"suppress_tokens": [9], "forced_eos_token_id": 3}, COPYING),
        (2, 12, "adaptive", DRAWN, {}),
    ],
)
def test_no_operation_meets_tensors_of_two_devices(
    tiny_qwen3, num_rows, tree_size, draft_length, distribution, options, monkeypatch
):
    monkeypatch.setattr(support, "_try_tree", lambda *args: None)
    monkeypatch.setattr(policy, "CHAINS_FIRST", 1)
    (ids, mask), target, texts = left_padded(PROMPTS[:num_rows]), copy.deepcopy(tiny_qwen3).double(), []
    drafter = build_drafter(target, draft_tree_size=tree_size, draft_length=draft_length)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None} | distribution
    for place in ({}, options | {"assistant_model": drafter}):
        torch.manual_seed(5)
        with elsewhere() if place else contextlib.nullcontext():
            if place:
                move(target)
                move(drafter)
            inputs = [Elsewhere(each) if place else each for each in (ids, mask)]
            texts.append(target.generate(inputs[0], attention_mask=inputs[1], **kwargs, **place).tolist())
    hf_domino.release_workspaces()
    assert texts[0] == texts[1]
    assert drafter.stats.tree_size == (16 if tree_size == "adaptive" else tree_size)

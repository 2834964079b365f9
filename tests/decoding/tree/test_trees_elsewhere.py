"""Trees where the models are on a device other than a CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from builders import build_drafter
from elsewhere import Elsewhere, elsewhere, move

import hf_domino
from hf_domino.decoding.pacing import ways
from hf_domino.decoding.tree import support


@pytest.mark.parametrize(
    ("tree_size", "draft_length", "options"),
    [
        (12, "adaptive", {"cache_implementation": "static"}),
        ("adaptive", "adaptive", {"prompt_lookup_num_tokens": 8}),
        (12, "full", {"prompt_lookup_num_tokens": 8}),
    ],
)
def test_no_operation_meets_tensors_of_two_devices(tiny_qwen3, tree_size, draft_length, options, monkeypatch):
    monkeypatch.setattr(support, "_trial", lambda *args: None)
    monkeypatch.setattr(ways, "FIRST_ROUNDS", 1)
    monkeypatch.setattr(ways, "EACH", 1)
    prompt, target = torch.arange(7, 13).repeat(3)[None], copy.deepcopy(tiny_qwen3)
    kwargs = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain = target.generate(prompt, **kwargs)
    drafter = build_drafter(target, draft_tree_size=tree_size, draft_length=draft_length)
    move(target)
    move(drafter)
    with elsewhere():
        text = target.generate(Elsewhere(prompt), assistant_model=drafter, **kwargs, **options)
    hf_domino.release_workspaces()
    assert text.tolist() == plain.tolist()
    assert drafter.stats.tree_size == (16 if tree_size == "adaptive" else tree_size)

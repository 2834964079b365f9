"""z-lab's own class: its logits are our baseline's, and its folders and ours hold the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from released import write_checkpoint
from safetensors import safe_open
from safetensors.torch import load_file
from test_released import FP32_TOL

from hf_domino import DominoDraftModel

pytestmark = pytest.mark.transformers

FIXTURE = Path(__file__).with_name("zlab.safetensors")  # of make_zlab_fixture.py


def test_logits_and_the_way_back(tmp_path):
    with safe_open(FIXTURE, "pt") as file:
        stored = json.loads(file.metadata()["config"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dictionary
    weights = {name.removeprefix("weights."): tensor for name, tensor in tensors.items() if name.startswith("weights.")}
    drafter = DominoDraftModel.from_pretrained(write_checkpoint(tmp_path / "theirs", stored, weights))
    features, lm_head = tensors["inputs.target_hidden"], tensors["inputs.lm_head"]
    for index, end in enumerate((9, 12)):  # theirs kept the first context in a cache
        positions = torch.arange(end + stored["block_size"])[None]
        with torch.no_grad():
            context = drafter.fuse_context(features[:, :end].split(stored["hidden_size"], dim=-1))
            hidden = drafter(tensors["inputs.noise"][index], positions[:, end:], context, positions[:, :end])
        torch.testing.assert_close(hidden @ lm_head.T, tensors["logits"][index], **FP32_TOL)
    drafter.export(tmp_path / "ours", dtype=stored["dtype"])
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in weights.items())
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert {name: config[name] for name in stored} == stored

"""In a loop of one's own, torch's `fully_shard` can divide the module of a training among processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import copy, json, os, sys, torch
import torch.distributed as dist
sys.path[:0] = sys.argv[1:3]
from builders import TINY, build_drafter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM
from hf_domino.targets.view import TargetModel
from hf_domino.training.drafter_training import DrafterTraining
from hf_domino.training.fields import TrainingFields

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
target = Qwen3ForCausalLM(Qwen3Config(**TINY)).requires_grad_(False).eval()
report = {}
for method in ("domino", "eagle3"):
    drafter = build_drafter(target, projector_type=method)
    view = TargetModel(target, drafter.config.layer_ids(target.config))
    whole = DrafterTraining(copy.deepcopy(drafter), view, TrainingFields())
    sharded = DrafterTraining(drafter, view, TrainingFields())
    if method == "domino":  # EAGLE-3's layer is also called in parts, which only the whole module gathers
        for layer in drafter.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    ids = torch.randint(4, 60, (2, 24), generator=torch.Generator().manual_seed(dist.get_rank()))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.ones_like(ids)}
    batch["anchors"] = torch.tensor([[1, 5, 9], [2, 6, 10]])
    losses = [module(**batch, lambda_base=0.5).loss for module in (whole, sharded)]
    for loss in losses:
        loss.backward()
    differences = []
    for name, weight in sharded.named_parameters():
        expected = whole.get_parameter(name).grad
        dist.all_reduce(expected)
        found = weight.grad.full_tensor()
        differences.append(float((found - expected / dist.get_world_size()).abs().max()))
    is_local = {weight.to_local().numel() < weight.numel() for weight in drafter.parameters() if weight.dim() > 1}
    report[method] = [*(loss.item() for loss in losses), max(differences), is_local == {True}]
if dist.get_rank() == 0:
    with open(sys.argv[3], "w") as file:
        json.dump(report, file)
dist.barrier()
dist.destroy_process_group()
"""
TOLERANCE = 1e-6  # gradients of about 1 in fp32, summed in another order


@pytest.mark.slow
def test_a_sharded_module_has_the_same_losses_and_gradients(tmp_path):
    script = tmp_path / "sharded.py"
    script.write_text(SCRIPT)
    tests = Path(__file__).parents[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, str(script), str(tests.parent), str(tests), str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.keys() == {"domino", "eagle3"}
    for loss, sharded, difference, is_local in report.values():
        assert sharded == loss
        assert difference < TOLERANCE
        assert is_local

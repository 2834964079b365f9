"""Two processes with half the batch each train, evaluate and save as one process does with all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# One fp32 rounding per sum, in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
SCRIPT = """
import os, sys, torch
sys.path[:0] = sys.argv[1:3]
from builders import TINY, build_drafter
from transformers import Qwen3Config, Qwen3ForCausalLM
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer

torch.set_num_threads(1)
torch.manual_seed(0)
target = Qwen3ForCausalLM(Qwen3Config(**TINY))
rows = [{"input_ids": torch.randint(3, 64, (20 + 3 * i,)).tolist(), "loss_mask": [0] * 5 + [1] * (15 + 3 * i)}
        for i in range(8)]
world = int(os.environ.get("WORLD_SIZE", 1))
args = DominoTrainingArguments(
    output_dir=sys.argv[3], max_steps=3, per_device_train_batch_size=4 // world, gradient_accumulation_steps=2,
    num_anchors=100, report_to="none", use_cpu=True, save_steps=2, save_total_limit=1, disable_tqdm=True, optim="sgd",
    learning_rate=0.05, ddp_backend="gloo" if world > 1 else None, per_device_eval_batch_size=2,
)
# Five rows in batches of two: one process has an odd last batch, two have to repeat rows.
trainer = DominoTrainer(build_drafter(target), target, args, train_dataset=rows, eval_dataset=rows[:5])
trainer.train()
trainer.save_model()
args.num_anchors = 4
trainer.save_metrics("eval", trainer.evaluate())
"""


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    from hf_domino import DominoDraftModel

    script, root = tmp_path / "train.py", Path(__file__).parents[2]
    script.write_text(SCRIPT)
    weights, metrics = [], []
    for launcher in ([], ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]):
        folder = tmp_path / f"run{len(weights)}"
        command = [sys.executable, *launcher, str(script), str(root), str(root / "tests"), str(folder)]
        subprocess.run(command, check=True, capture_output=True, timeout=240)
        weights.append(DominoDraftModel.from_pretrained(folder).state_dict())
        results = json.loads((folder / "eval_results.json").read_text())
        metrics.append([value for name, value in sorted(results.items()) if name.endswith(("loss", "length"))])
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["checkpoint-3"]
        assert len(list(folder.glob("checkpoint-3/rng_state*"))) == len(weights)
    torch.testing.assert_close(*weights, **TOLERANCE)
    assert len(metrics[0]) == 5
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-4)

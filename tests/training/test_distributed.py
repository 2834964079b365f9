"""Two processes with half the batch each train, evaluate and save as one process does with all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_domino import DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments

# One fp32 rounding per sum, in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
# Muon orthogonalises in bf16; and AdamW's first steps are of the signs of gradients, which a rounding may turn.
MUON_TOLERANCE = {"rtol": 2e-2, "atol": 2e-3}
SCRIPT = """
import json, os, shutil, sys, torch
sys.path[:0] = sys.argv[1:3]
from builders import TINY, build_drafter
from transformers import Qwen3Config, Qwen3ForCausalLM
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer

torch.set_num_threads(1)
world, folder, fields = int(os.environ.get("WORLD_SIZE", 1)), sys.argv[3], json.loads(sys.argv[4])
num_drafted = fields.pop("num_drafted", 64)

def build():
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(Qwen3Config(**TINY))
    rows = [{"input_ids": torch.randint(3, 64, (20 + 3 * i,)).tolist(), "loss_mask": [0] * 5 + [1] * (15 + 3 * i)}
            for i in range(8)]
    usual = dict(
        output_dir=folder, max_steps=3, per_device_train_batch_size=4 // world, gradient_accumulation_steps=2,
        num_anchors=6, report_to="none", use_cpu=True, save_steps=2, save_total_limit=2, disable_tqdm=True,
        per_device_eval_batch_size=2, warmup_steps=0,
        ddp_backend="gloo" if world > 1 else None, max_grad_norm=0.3, logging_steps=1,
    )
    args = DominoTrainingArguments(**usual | fields)
    # Five rows in batches of two: one process has an odd last batch, two have to repeat rows.
    drafter = build_drafter(target).restricted(range(64 - num_drafted, 64))
    return DominoTrainer(drafter, target, args, train_dataset=rows, eval_dataset=rows[:5])

trainer = build()
trainer.train()
trainer.save_model()
trainer.args.num_anchors = 4
metrics = trainer.evaluate()
once = {name: weight.clone() for name, weight in trainer.drafter.state_dict().items()}
trainer.accelerator.wait_for_everyone()
if trainer.is_world_process_zero():
    shutil.rmtree(f"{folder}/checkpoint-{trainer.state.max_steps}")
trainer.accelerator.wait_for_everyone()
again = build()
again.train(resume_from_checkpoint=True)
resumed = again.drafter.state_dict()
assert all(torch.equal(once[name], resumed[name]) for name in once)
metrics["log"] = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
if trainer.is_world_process_zero():
    with open(folder + "/metrics.json", "w") as file:
        json.dump(metrics, file)
"""
SGD, ADAMW = ({"optim": name, "learning_rate": 0.05} for name in ("sgd", "adamw_torch"))


def launch(folder: Path, fields: dict, num_processes: int) -> tuple[dict, dict]:
    """Train in processes of their own: the final weights, and what was logged and measured."""
    script, tests = folder.with_suffix(".py"), Path(__file__).parents[1]
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    paths = [str(path) for path in (tests.parent, tests, folder)]
    command = [sys.executable, *(torchrun if num_processes > 1 else []), str(script), *paths, json.dumps(fields)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(list(folder.glob(f"checkpoint-{fields.get('max_steps', 3)}/rng_state*"))) == num_processes
    return DominoDraftModel.from_pretrained(folder).state_dict(), metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        (SGD, TOLERANCE),
        (SGD | {"train_sampling_strategy": "group_by_length"}, TOLERANCE),
        # An epsilon as large as gradients: Adam's first steps would else be of their signs.
        (ADAMW | {"adam_epsilon": 1e-2}, TOLERANCE),
        (ADAMW | {"adam_epsilon": 1e-2, "num_drafted": 30}, TOLERANCE),
        (ADAMW | {"learning_rate": 5e-4, "muon_learning_rate": 0.02}, MUON_TOLERANCE),
    ],
    ids=["sgd", "grouped by length", "adamw", "draft vocabulary", "muon"],
)
def test_two_processes_equal_one(fields, tolerance, tmp_path):
    weights, metrics = launch(tmp_path / "one", fields, 1)
    lengths = [name for name in metrics if name.endswith(("loss", "length"))]
    assert len(lengths) == 7
    assert all(norm > 0.3 for _, norm in metrics["log"])  # so that gradients are clipped
    others, found = launch(tmp_path / "two", fields, 2)
    torch.testing.assert_close(others, weights, **tolerance)
    if tolerance is TOLERANCE:  # before a step, weights are equal
        assert found["log"][0][0] == pytest.approx(metrics["log"][0][0], rel=1e-6)
    for one, two in zip(metrics["log"], found["log"], strict=True):
        assert two == pytest.approx(one, rel=tolerance["rtol"])
    for name in lengths:
        assert found[name] == pytest.approx(metrics[name], rel=5 * tolerance["rtol"])


@pytest.mark.slow
def test_batches_of_balanced_cost_are_resumed_within_a_later_epoch(tmp_path):
    """The script compares the resumed run with the uninterrupted one."""
    fields = {"train_sampling_strategy": "batch_rebalance", "per_device_train_batch_size": 1}
    launch(tmp_path / "two", SGD | fields | {"max_steps": 4, "save_steps": 3}, 2)


def test_several_gpus_in_a_process_and_shards_are_refused(
    target, make_drafter, make_trainer, greedy_rows, tmp_path, monkeypatch
):
    monkeypatch.setattr(DominoTrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="n_gpu must be at most 1 per process, got 2"):
        make_trainer(make_drafter(target), greedy_rows)
    with pytest.raises(ValueError, match="fsdp must be left out, got 'full_shard'"):
        DominoTrainingArguments(str(tmp_path), fsdp="full_shard")
    with pytest.raises(ValueError, match=r"deepspeed must be left out, got 'zero.json'"):
        DominoTrainingArguments(str(tmp_path), deepspeed="zero.json")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")  # by a configuration of accelerate's
    with pytest.raises(ValueError, match="fsdp must be left out, got 'ACCELERATE_USE_FSDP=true'"):
        DominoTrainingArguments(str(tmp_path))

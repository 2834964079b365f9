"""Two processes with half the batch each train, evaluate and save as one process does with all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from accelerate.utils import DistributedType

from hf_domino import DominoDraftModel
from hf_domino.training.scale.sharding import prepare_sharding, shard_target

# One fp32 rounding per sum, in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
# Muon orthogonalises in bf16; and AdamW's first steps are of the signs of gradients, which a rounding may turn.
MUON_TOLERANCE = {"rtol": 2e-2, "atol": 2e-3}
# bf16 products of whole or gathered weights are the same ones; their sums are not.
BF16_TOLERANCE = {"rtol": 1e-2, "atol": 2e-3}
SCRIPT = """
import json, os, shutil, sys, torch
sys.path[:0] = sys.argv[1:4]
import fsdp_on_cpu
from builders import TINY, build_drafter
from transformers import Qwen3Config, Qwen3ForCausalLM
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.trainer import DominoTrainer

torch.set_num_threads(1)
world, fields = int(os.environ.get("WORLD_SIZE", 1)), json.loads(sys.argv[5])
num_drafted = fields.pop("num_drafted", 64)

def build():
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(Qwen3Config(**TINY))
    rows = [{"input_ids": torch.randint(3, 64, (20 + 3 * i,)).tolist(), "loss_mask": [0] * 5 + [1] * (15 + 3 * i)}
            for i in range(8)]
    args = DominoTrainingArguments(
        output_dir=sys.argv[4], max_steps=3, per_device_train_batch_size=4 // world, gradient_accumulation_steps=2,
        num_anchors=6, report_to="none", use_cpu=True, save_steps=2, save_total_limit=2, disable_tqdm=True,
        per_device_eval_batch_size=2, warmup_steps=0,
        ddp_backend="gloo" if world > 1 else None, max_grad_norm=0.3, logging_steps=1, **fields,
    )
    # Five rows in batches of two: one process has an odd last batch, two have to repeat rows.
    drafter = build_drafter(target).restricted(range(64 - num_drafted, 64))
    return DominoTrainer(drafter, target, args, train_dataset=rows, eval_dataset=rows[:5])

def whole(trainer):
    weights = trainer.drafter.state_dict()
    return {name: getattr(weight, "full_tensor", weight.clone)() for name, weight in weights.items()}

trainer = build()
trainer.train()
trainer.save_model()
trainer.args.num_anchors = 4
metrics = trainer.evaluate()
if fields["optim"] != "sgd":  # which keeps nothing: torch cannot load what FSDP saves of that
    once = whole(trainer)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        shutil.rmtree(sys.argv[4] + "/checkpoint-3")
    trainer.accelerator.wait_for_everyone()
    again = build()
    again.train(resume_from_checkpoint=True)
    resumed = whole(again)
    assert all(torch.equal(once[name], resumed[name]) for name in once)
metrics["log"] = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
metrics["sharded"] = [any(type(weight).__name__ == "DTensor" for weight in model.parameters())
                      for model in (trainer.drafter, trainer.target.model)]
if trainer.is_world_process_zero():
    with open(sys.argv[4] + "/metrics.json", "w") as file:
        json.dump(metrics, file)
"""
FSDP = {"fsdp": True}
SGD, ADAMW = ({"optim": name, "learning_rate": 0.05} for name in ("sgd", "adamw_torch"))


def launch(folder: Path, fields: dict, num_processes: int) -> tuple[dict, dict]:
    """Train in processes of their own: the final weights, and what was logged and measured."""
    script, tests = folder.with_suffix(".py"), Path(__file__).parents[1]
    script.write_text(SCRIPT)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    paths = [str(path) for path in (tests.parent, tests, tests / "training", folder)]
    command = [sys.executable, *(torchrun if num_processes > 1 else []), str(script), *paths, json.dumps(fields)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert len(list(folder.glob("checkpoint-3/rng_state*"))) == num_processes
    return DominoDraftModel.from_pretrained(folder).state_dict(), metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shared", "modes", "tolerance"),
    [
        (SGD, [{}, FSDP, FSDP | {"shard_target": True}], TOLERANCE),
        (SGD | {"bf16": True}, [FSDP], BF16_TOLERANCE),
        # An epsilon as large as gradients: Adam's first steps would else be of their signs.
        (ADAMW | {"adam_epsilon": 1e-2}, [{}, FSDP], TOLERANCE),
        (ADAMW | {"adam_epsilon": 1e-2, "num_drafted": 30}, [{}, FSDP | {"shard_target": True}], TOLERANCE),
        (ADAMW | {"learning_rate": 5e-4, "muon_learning_rate": 0.02}, [{}, FSDP], MUON_TOLERANCE),
    ],
    ids=["fp32", "bf16", "adamw", "draft vocabulary", "muon"],
)
def test_two_processes_equal_one(shared, modes, tolerance, tmp_path):
    weights, metrics = launch(tmp_path / "one", shared, 1)
    lengths = [name for name in metrics if name.endswith(("loss", "length"))]
    assert len(lengths) == 7
    assert all(norm > 0.3 for _, norm in metrics["log"])  # so that gradients are clipped
    for index, mode in enumerate(modes):
        others, found = launch(tmp_path / f"two{index}", shared | mode, 2)
        torch.testing.assert_close(others, weights, **tolerance)
        if tolerance is TOLERANCE:  # before a step, weights are equal
            assert found["log"][0][0] == pytest.approx(metrics["log"][0][0], rel=1e-6)
        for one, two in zip(metrics["log"], found["log"], strict=True):
            assert two == pytest.approx(one, rel=tolerance["rtol"])
        for name in lengths:
            assert found[name] == pytest.approx(metrics[name], rel=5 * tolerance["rtol"])
        assert found["sharded"] == ["fsdp" in mode, "shard_target" in mode]


def test_what_cannot_be_sharded_is_refused(target, make_drafter, make_trainer, greedy_rows):
    args = SimpleNamespace(n_gpu=0, fsdp=True, device=torch.device("cpu"), world_size=2)
    with pytest.raises(ValueError, match="fsdp must be unset on cpu, where accelerate does not shard, got True"):
        prepare_sharding(args, SimpleNamespace(distributed_type=DistributedType.MULTI_CPU))
    with pytest.raises(ValueError, match="shard_target must be unset with one process, got True"):
        make_trainer(make_drafter(target), greedy_rows, shard_target=True)
    cpu_offload(target, torch.device("cpu"))
    with pytest.raises(ValueError, match="shard_target must be unset for a target that is placed"):
        shard_target(target, args)

"""Plans: what is counted is what is there, estimates are near what was measured, time follows from a rate."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from builders import TINY
from transformers import Qwen3Config

from hf_domino import DominoConfig
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.scale.plan import count_sizes, measure_flops, plan_training

ROOT = Path(__file__).parents[2]
# Allocators, and what kernels take for themselves, are not in the estimate.
FACTOR = 1.3
SCRIPT = """
import gc, json, sys, torch
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.scale.plan import plan_training
from hf_domino.training.trainer import DominoTrainer

torch.set_num_threads(1)

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])

def measure(folder, vocab_size, num_layers, rows, length, anchors, **fields):
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    before = kilobytes("VmRSS")
    config = Qwen3Config(vocab_size=vocab_size, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
                         num_attention_heads=8, num_key_value_heads=4, head_dim=32)
    shape = DominoConfig.for_target(config, num_hidden_layers=num_layers, block_size=8, mask_token_id=1)
    args = DominoTrainingArguments(
        folder, max_steps=2, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, max_length=length,
        num_anchors=anchors, per_device_train_batch_size=rows, **fields,
    )
    tokens = torch.randint(3, vocab_size, (rows, length)).tolist()
    records = [{"input_ids": row, "loss_mask": [1] * length} for row in tokens]
    DominoTrainer(DominoDraftModel(shape), Qwen3ForCausalLM(config), args, train_dataset=records).train()
    return plan_training(config, shape, args).peak_bytes, kilobytes("VmHWM") - before

distilled = measure(sys.argv[1], 20_000, 1, rows=1, length=128, anchors=32, distillation_weight=0.5)
activations = measure(sys.argv[1], 2_000, 2, rows=4, length=256, anchors=64)
checkpointed = measure(sys.argv[1], 2_000, 4, rows=4, length=256, anchors=64, gradient_checkpointing=True)
print(json.dumps([distilled, activations, checkpointed]))
"""


@pytest.fixture
def shapes():
    """Configurations of a target and its drafter."""
    config = Qwen3Config(**TINY)
    return config, DominoConfig.for_target(config, block_size=4, num_hidden_layers=3)


@pytest.fixture
def make_args(tmp_path):
    """A function that builds training arguments, of AdamW on the text's tokens unless they say otherwise."""
    plain = {"muon_learning_rate": None, "distillation_weight": 0.0, "use_cpu": True, "report_to": "none"}
    return lambda **fields: DominoTrainingArguments(str(tmp_path), **plain | fields)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured by Linux")
def test_peak_memory_is_near_what_is_measured(tmp_path):
    # Freed tensors go back to the system, so that the peak is of what was alive.
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels/torch-ext"), *sys.path]),
        "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0",
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    plans = json.loads(done.stdout.splitlines()[-1])
    assert all(measured / FACTOR < estimated < measured * FACTOR for estimated, measured in plans), plans


def test_parts_follow_from_what_there_is(make_args, target, make_drafter):
    drafter = make_drafter(target)
    sizes = count_sizes(target.config, drafter.config)
    assert (sizes.target, sizes.drafter) == (target.num_parameters(), drafter.num_parameters())
    assert sizes.ends == target.lm_head.weight.numel()  # tied
    memory = plan_training(target.config, drafter.config, make_args()).memory
    assert memory["drafter (fp32)"] == 4 * sizes.drafter
    assert memory["optimizer"] == 8 * sizes.drafter
    muon = plan_training(target.config, drafter.config, make_args(muon_learning_rate=0.02))
    assert muon.memory["optimizer"] == 8 * sizes.drafter - 4 * sizes.matrices
    with pytest.raises(ValueError, match=r"optim must be among .* for a plan, got 'adafactor'"):
        plan_training(target.config, drafter.config, make_args(optim="adafactor"))


def test_options_of_the_loss_cost_what_they_keep(shapes, make_args):
    plain = plan_training(*shapes, make_args(), num_rows=9)
    average = plan_training(*shapes, make_args(ema_decay=0.9))
    assert average.peak_bytes - plain.peak_bytes == plain.memory["drafter (fp32)"]
    again = plan_training(*shapes, make_args(gradient_checkpointing=True))
    assert again.memory["activations"] < plain.memory["activations"]
    assert again.flops_per_step["drafter"] > plain.flops_per_step["drafter"]
    taught = plan_training(*shapes, make_args(distillation_weight=0.5), num_rows=9)
    layers = len(shapes[1].target_layer_ids)
    assert taught.hidden_states_bytes == plain.hidden_states_bytes // layers * (layers + 1)
    assert taught.memory["logits of a chunk"] > plain.memory["logits of a chunk"]


def test_what_is_divided_among_processes(shapes, make_args):
    alone = plan_training(*shapes, make_args(), num_processes=1).memory
    ddp = plan_training(*shapes, make_args(), num_processes=4).memory
    sharded = plan_training(*shapes, make_args(fsdp=True, shard_target=True), num_processes=4).memory
    assert ddp["gradients (fp32)"] == 2 * alone["gradients (fp32)"]  # and their buckets
    assert ddp["target (float32)"] == alone["target (float32)"] > sharded["target (float32)"]
    assert sharded["optimizer"] == alone["optimizer"] // 4
    assert sharded["activations"] == alone["activations"]


def test_time_and_disk_follow_from_rows_and_rate(shapes, make_args):
    args = make_args(per_device_train_batch_size=2, gradient_accumulation_steps=3, num_train_epochs=2, max_length=100)
    plan = plan_training(*shapes, args, num_rows=50, num_processes=4, flops_per_second=1e9)
    assert plan.steps == 6  # 50 rows are 7 batches of 8, 3 steps an epoch
    assert plan.seconds_per_step == sum(plan.flops_per_step.values()) / 1e9
    assert plan.hours == pytest.approx(plan.steps * plan.seconds_per_step / 3600)
    layers = len(shapes[1].target_layer_ids)
    assert plan.hidden_states_bytes == 2 * 32 * layers * 100 * 50
    longest, asked = (plan_training(*shapes, make_args(max_length=length), num_rows=9) for length in (256, 2048))
    assert longest == asked  # all that the target reads
    unknown = plan_training(*shapes, args)
    assert (unknown.steps, unknown.hours, unknown.seconds_per_step) == (None, None, None)
    assert measure_flops(torch.device("cpu"), torch.float32) > 1e6

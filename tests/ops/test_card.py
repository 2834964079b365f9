"""The card's example runs, and its tables are what sizes and measured rows give."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "model_cards" / "workshop" / "benchmarks"
CARD = (ROOT / "kernels" / "CARD.md").read_text()


def test_example():
    scope = {
        "token_ids": torch.tensor([3]),
        "state": torch.zeros(1, 4),
        "weight_ih": torch.randn(12, 6),
        "weight_hh": torch.randn(12, 4),
        "embedding": torch.randn(9, 6),
        "block_part": torch.randn(1, 5),
        "weight_state": torch.randn(5, 4),
        "base_logits": torch.randn(1, 9),
        "up_weight": torch.randn(9, 5),
    }
    exec(re.search(r"```python\n(.*?)```", CARD, re.DOTALL)[1], scope)
    assert scope["token_ids"].shape == (1,)


def rows_of(name, card="h100"):
    return [json.loads(line) for line in (ROWS / card / f"{name}.jsonl").read_text().splitlines()]


def test_times_on_a_gpu():
    printed = re.findall(r"^\| `(\w+)`, (.+?) \| ([\d.]+) \| ([\d.]+) \|$", CARD, re.MULTILINE)
    assert len(printed) == 6
    for kernel, case, *times in printed:
        for implementation, time in zip(("reference", "triton"), times, strict=True):
            (row,) = (r for r in rows_of(kernel) if (r["case"], r["implementation"]) == (case, implementation))
            assert f"{1e3 * row['median_ms']:.1f}" == time
            assert not row["dry_run"]
    finding = next(row for row in rows_of("head") if row["case"] == "top-k of the pools")
    assert f"takes {1e3 * finding['median_ms']:.0f} us to find" in CARD


def test_times_of_a_round_on_a_gpu():
    text = (ROOT / "docs" / "gpu.md").read_text()
    for row in rows_of("rounds"):
        assert f"| {row['ms']:.1f} | {row['floor_ms']:.1f} |" in text
    took = {row["method"]: row["ms"] for row in rows_of("rounds")}
    said = f"from {took['static, launched']:.0f} to {took['static, graphs']:.0f} ms on an H100"
    assert said in (ROOT / "README.md").read_text()
    busy = {row["method"]: row["gpu_ms"] for row in rows_of("profile") if "gpu_ms" in row}
    assert f"take {busy['static, compiled']:.1f} ms then, in place of {busy['static, graphs']:.1f}" in text
    stages = next(row["stage_ms"] for row in rows_of("profile") if "stage_ms" in row)
    said = "verification takes {verify:.1f}, the backbone {backbone:.1f}, the correction {rollout:.1f}"
    assert said.format(**stages) in text


def test_times_of_a_round_of_trees_on_a_gpu():
    text = " ".join((ROOT / "docs" / "speed.md").read_text().split())
    graphs, compiled = rows_of("trees", "h200")
    assert f"of {graphs['tree_size']} took {graphs['ms']:.1f} ms on an H200 at" in text
    assert f"and {compiled['ms']:.1f} ms compiled, measured once; the floor is {graphs['floor_ms']:.1f} ms" in text

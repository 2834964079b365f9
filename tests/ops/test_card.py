"""The card's example runs, and its tables are what sizes and measured rows give."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from hf_domino.evaluation.results import read_results

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
    return read_results(ROWS / card / f"{name}.jsonl")


def test_times_on_a_gpu():
    printed = re.findall(r"^\| `(\w+)`, (.+?) \| ([\d.]+) \| ([\d.]+) \|$", CARD, re.MULTILINE)
    assert len(printed) == 6
    for kernel, case, *times in printed:
        for implementation, time in zip(("reference", "triton"), times, strict=True):
            (row,) = (r for r in rows_of(kernel) if (r["case"], r.method) == (case, implementation))
            assert f"{1e3 * row['median_ms']:.1f}" == time
            assert not row["dry_run"]
    finding = next(row for row in rows_of("head") if row["case"] == "top-k of the pools")
    assert f"takes {1e3 * finding['median_ms']:.0f} us to find" in CARD

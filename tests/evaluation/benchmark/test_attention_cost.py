"""The cost of a training step: what is measured is what was asked for."""

from __future__ import annotations

from argparse import Namespace

import pytest

from hf_domino.drafter import backbone
from hf_domino.evaluation.benchmark.attention import measure_step

SIZES = {"length": 64, "num_anchors": 8, "block_size": 4, "hidden_size": 128, "num_layers": 1, "heads_per_key_head": 2}


@pytest.mark.parametrize("attention", ["tiles", "dense"])
def test_a_step_is_measured(attention, monkeypatch):
    monkeypatch.setattr(backbone, "can_flex", backbone.can_flex)
    monkeypatch.setattr(backbone, "MAX_DENSE_SCORES", 0)
    row = measure_step(Namespace(attention=attention, repeats=2, device="cpu", **SIZES))
    assert 0 < row["seconds"] < 10
    assert 10 < row["peak_mb"] < 100_000
    assert row["attention"] == attention
    assert (backbone.MAX_DENSE_SCORES > 0) == (attention == "dense")

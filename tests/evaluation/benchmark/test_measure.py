"""What is measured again has not been learnt from."""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import pytest
import torch

import hf_domino
from hf_domino.evaluation.benchmark import measure
from hf_domino.evaluation.benchmark.measure import Bench
from hf_domino.pair import load_pair


@pytest.mark.parametrize("has_events", [False, True], ids=["", "gpu"])
@pytest.mark.parametrize("make", [hf_domino.recycling, hf_domino.lookahead])
def test_each_text_begins_with_an_empty_table(tiny_pair_folder, make, has_events, monkeypatch):
    if has_events:  # phases have a run of their own there
        time_it = Bench._time

        def without_phases(*arguments):
            with monkeypatch.context() as inner:
                inner.setattr(measure, "timed_phases", nullcontext)
                time_it(*arguments)

        monkeypatch.setattr(Bench, "_time", without_phases)
    pair = load_pair(str(tiny_pair_folder), dtype=torch.float32, device="cpu")
    drafter = make(pair.target, draft_length="full")
    options = argparse.Namespace(temperature=0.0, repeats=3, max_new_tokens=24, seed=0)
    bench = Bench(pair, {"plain": {}, "drafted": {"assistant_model": drafter}}, options)
    batch = [{"text": "t7 t8 t9"}]
    bench.warm_up(batch)
    _, row = bench.measure("greedy", 0, batch)
    alone = make(pair.target, draft_length="full")
    inputs, call = bench._inputs(batch), {"do_sample": False, "max_new_tokens": 24, "assistant_model": alone}
    pair.target.generate(**inputs, **call)
    assert row["num_rounds"] == len(alone.stats.rows[0])
    pair.target.generate(**inputs, **call)
    assert row["num_rounds"] > len(alone.stats.rows[0])  # a table that has seen the text

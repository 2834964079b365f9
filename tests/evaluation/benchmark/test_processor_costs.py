"""The table of what processors cost: every known one is in it, beside none."""

import torch
from builders import TINY

from hf_domino.decoding.processors.stock import EFFECTS
from hf_domino.evaluation.benchmark import processors


def test_every_known_processor_is_measured(monkeypatch):
    monkeypatch.setattr(processors, "SIZES", {name: TINY[name] for name in processors.SIZES} | {"vocab_size": 700})
    monkeypatch.setattr(processors, "DRAFTER", processors.DRAFTER | {"emb_dim": 16, "gru_hidden_dim": 16})
    rows = processors.measure(text_length=120, dtype=torch.float32, repeats=1)
    assert rows[0]["processors"] == "none"
    assert rows[0]["rollout_ratio"] == rows[0]["verification_ratio"] == 1
    assert all(row["rollout_ms"] > 0 and row["verification_ms"] > 0 for row in rows)
    lists = processors.processors_of(torch.arange(600, 680)[None], 700)
    assert list(lists) == [row["processors"] for row in rows]
    assert set(EFFECTS) <= {type(processor) for some in lists.values() for processor in some}

"""Rows as `python model_cards/workshop study` writes them, made up, for tests of what is computed from rows."""

from __future__ import annotations

import textwrap

from study.plan import load_study

STUDY = """
base: {num_hidden_layers: 2, per_device_train_batch_size: 8, num_anchors: 24}
budgets: {small: {steps: 2, texts: 3}, large: {steps: 4, texts: 3}}
variants:
  domino: {question: The base, seeds: 3}
  dflash: {question: The twin, seeds: 3, projector_type: dflash}
  head_only: {question: A frozen backbone, seeds: 3, against: dflash, backbone_of: dflash}
  layers_1: {question: One layer, num_hidden_layers: 1}
  greedy_text: {question: Greedy text, text: greedy}
"""
ORIGIN = {
    "steps": 2, "base": {"per_device_train_batch_size": 8, "num_anchors": 24}, "target": "tiny", "rows": 16,
    "num_rounds": 100, "num_texts": 3, "acceptance_error": 0.1, "base_loss": 2.5, "corrected_loss": 2.0,
    "parameters": 2_500_000, "seconds": 60.0, "cpu_seconds": 59.0, "hardware": "a CPU", "threads": 1, "torch": "2",
    "transformers": "5", "commit": "0123456789abcdef", "date": "2026-01-01",
}  # fmt: skip
LENGTHS = {"domino": (3.0, 3.1, 3.2), "dflash": (2.5, 2.6, 2.4), "head_only": (2.6, 2.5, 2.55)}


def study(tmp_path, text=STUDY):
    """The study above, or another, loaded from a file."""
    path = tmp_path / "study.yaml"
    path.write_text(textwrap.dedent(text))
    return load_study(path)


def row(variant, seed, length, **fields):
    """One row; the acceptance length comes from three positions."""
    rates = [round((length - 1) * share, 6) for share in (0.5, 0.3, 0.2)]
    changes = {"variant": variant, "seed": seed, "budget": "small", "changes": {}}
    return changes | {"acceptance_length": length, "acceptance_rate_at": rates} | ORIGIN | fields


def rows():
    """Three seeds of three variants, and one of two more."""
    core = [row(name, seed, length) for name, lengths in LENGTHS.items() for seed, length in enumerate(lengths)]
    return [*core, row("layers_1", 0, 2.2, parameters=1_900_000), row("greedy_text", 0, 3.05)]

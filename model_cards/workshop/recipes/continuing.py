"""A target continues prompts of token ids: text in its own words, for recipes and studies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_domino._common.atomic_writes import write_atomic
from hf_domino.data.units import run_units
from hf_domino.data.writers import SEED_STRIDE, Sampling, TargetWriter
from hf_domino.targets.identity import identify

BATCH_SIZE, SEED = 64, 0
Row = dict[str, Any]


def settings_file(output: Path) -> Path:
    """Where the target of a text is written down."""
    return output.with_name(output.name + ".settings.json")


def continue_prompts(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    output: Path,
    max_new_tokens: int,
    temperatures: Sequence[float],
    shard: tuple[int, int] = (0, 1),
) -> Path:
    """Let a target continue prompts of token ids, in batches of like length that take the temperatures in turn.

    A process that was broken off goes on where it stopped; `shard` is its number, and how many there are.
    """
    ordered = sorted(map(list, prompts), key=len)
    starts = range(0, len(ordered), BATCH_SIZE)
    batches = list(enumerate(ordered[start : start + BATCH_SIZE] for start in starts))[shard[0] :: shard[1]]
    writer, identity = TargetWriter(target), identify(target).to_dict()

    def make(unit: int) -> list[Row]:
        number, batch = batches[unit]
        temperature = temperatures[number % len(temperatures)]
        texts = writer.write(batch, Sampling(max_new_tokens, temperature), SEED * SEED_STRIDE + number)
        return [
            {"input_ids": prompt + text.ids, "prompt_length": len(prompt), "temperature": temperature}
            for prompt, text in zip(batch, texts, strict=True)
        ]

    made_of = json.dumps([ordered, max_new_tokens, list(temperatures), shard, identity["weights_digest"]])
    units = output.with_suffix("." + hashlib.sha256(made_of.encode()).hexdigest()[:8])
    rows = run_units(units, (0, 1), shard[0] == 0, output.stem, len(batches), make)
    write_atomic(settings_file(output), json.dumps({"target": identity}))
    write_atomic(output, "".join(json.dumps(row) + "\n" for row in rows))
    return output

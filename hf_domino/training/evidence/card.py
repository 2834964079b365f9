"""Write the drafter's card from the records of a training that runs in this process."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_domino._common.provenance import provenance
from hf_domino.cards.render import render_card
from hf_domino.cards.sections import CARD, merge_card, read_text
from hf_domino.cards.training import draw_training, training_section
from hf_domino.data.row_counts import RowCounts
from hf_domino.training.fields import RECORDED


def write_card(trainer: Any, name: str | None, target: str | None, metadata: Mapping[str, Any]) -> None:
    """Write the card of a trainer's drafter to `output_dir`; an existing card keeps the sections that others wrote.

    `target` is named instead of the target that was loaded. `metadata` are fields for the metadata block of the card;
    those without a value are left out.
    """
    args = trainer.args
    config = trainer.drafter.config
    made = provenance(str(trainer.args.device))
    facts: dict[str, Any] = {}
    for use, rows in (("train", trainer.train_dataset), ("eval", trainer.eval_dataset)):
        if hasattr(rows, "__len__"):
            facts[f"{use} rows"] = len(rows)
        facts[f"{use} rows left out"] = getattr(rows, "counts", RowCounts()).left_out or None
    facts["rows per step"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    facts |= {"block_size": config.block_size, "draft_vocab_size": config.draft_vocab_size}
    facts |= {field: getattr(args, field) for field in RECORDED} | {"loss_decay": trainer.drafter_training.loss_decay}
    versions = ", ".join(f"{package} {made[package]}" for package in ("hf_domino", "torch", "transformers"))
    facts |= {"hardware": made["hardware"], "versions": versions, "date": made["date"]}
    known = {field: value for field, value in metadata.items() if value}
    path = Path(args.output_dir) / CARD
    if isinstance(known.get("datasets"), str):
        known["datasets"] = [known["datasets"]]
    with suppress(ImportError, OSError):  # a card without a picture is fine
        draw_training(trainer.state, path.parent)
    peft_config = getattr(trainer.model, "peft_config", None)
    adapter = peft_config and peft_config[trainer.model.active_adapter].to_dict()
    card = render_card(
        config,
        name=name or path.resolve().parent.name,
        target=target or config.target_name or trainer.target.model.name_or_path or None,
        training=training_section(trainer.state, facts, path.parent),
        adapter=adapter,
        metadata=known,
    )
    path.write_text(merge_card(read_text(path), card, wins=known), encoding="utf-8")

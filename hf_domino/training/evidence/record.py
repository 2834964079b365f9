"""Record how a drafter is trained while its trainer runs, and write its card from that record."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_domino._common.provenance import provenance
from hf_domino._common.run_record import Run, Text
from hf_domino.cards.render import render_card
from hf_domino.cards.sections import CARD, merge_card, read_text
from hf_domino.cards.training import draw_training
from hf_domino.data.row_counts import RowCounts
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.fields import RECORDED


def run_of(trainer: Any) -> Run:
    """Return the record of a trainer's run so far."""
    config = trainer.drafter.config
    texts = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
    return Run(
        steps=trainer.state.global_step,
        tokens=trainer.state.num_input_tokens_seen,
        arguments={"block_size": config.block_size, "draft_vocab_size": config.draft_vocab_size}
        | recorded_arguments(trainer.args)
        | {"loss_decay": trainer.drafter_training.loss_decay},
        texts={use: text_of(rows) for use, rows in texts.items() if rows is not None},
        log=trainer.state.log_history,
        provenance=provenance(str(trainer.args.device)),
        base_digest=trainer.base_digest,
    )


def recorded_arguments(args: DominoTrainingArguments) -> dict[str, Any]:
    """Return the arguments that a [`Run`] records, with plain values."""
    values = {name: getattr(args, name) for name in RECORDED}
    return {name: getattr(value, "value", value) for name, value in values.items()}


def text_of(rows: Any) -> Text:
    """Return how many examples a data set, a stream or a dictionary of data sets has, as far as it is known."""
    parts = list(rows.values()) if isinstance(rows, dict) else [rows]
    counts = RowCounts.sum(getattr(part, "counts", RowCounts()) for part in parts)
    examples = None
    if all(hasattr(part, "__len__") for part in parts):
        examples = sum(map(len, parts))
    names = [getattr(part, "dataset_name", None) for part in parts]
    return Text(examples, counts.tokens or None, counts.left_out, next(filter(None, names), None))


def write_card(trainer: Any, name: str | None, target: str | None, metadata: Mapping[str, Any]) -> None:
    """Write the record and the card of a trainer's drafter to `output_dir`.

    An existing card keeps the sections that others wrote. `target` is named instead of the target that was loaded.
    `metadata` are fields for the metadata block of the card; those without a value are left out.
    """
    args = trainer.args
    config = trainer.drafter.config
    run = run_of(trainer)
    path = Path(args.output_dir) / CARD
    run.save(path.parent)
    known = {field: value for field, value in metadata.items() if value}
    if isinstance(known.get("datasets"), str):
        known["datasets"] = [known["datasets"]]
    with suppress(ImportError, OSError):  # a card without a picture is fine
        draw_training(run, path.parent)
    peft_config = getattr(trainer.model, "peft_config", None)
    adapter = peft_config and peft_config[trainer.model.active_adapter].to_dict()
    card = render_card(
        config,
        name=name or path.resolve().parent.name,
        target=target or config.target_name or trainer.target.model.name_or_path or None,
        run=run,
        folder=path.parent,
        adapter=adapter,
        metadata=known,
    )
    path.write_text(merge_card(read_text(path), card, wins=known), encoding="utf-8")

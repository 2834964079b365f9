"""Record how a drafter is trained while its trainer runs, and write its card from that record."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_domino._common.provenance import provenance
from hf_domino._common.run_record import Run, Text
from hf_domino.cards.render import render_card
from hf_domino.cards.sections import CARD, merge_card, read_text
from hf_domino.cards.training import draw_training
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.data.row_counts import RowCounts
from hf_domino.data.rows import RowDataset
from hf_domino.training.arguments import DominoTrainingArguments
from hf_domino.training.drafter_training import loss_decay_of
from hf_domino.training.fields import OF_ADAMW, RECORDED
from hf_domino.training.hidden_states.folder import CachedRows

MUON = "muon_with_adamw"  # the name of our optimizer in a record
DIGESTED_EXAMPLES = 64


def run_of(trainer: Any) -> Run:
    """Return the record of a trainer's run so far."""
    return Run(
        steps=trainer.state.global_step,
        tokens=trainer.state.num_input_tokens_seen,
        arguments=recorded_arguments(trainer.args, trainer.drafter.config, trainer.given_optimizer),
        texts=texts_of(trainer),
        log=trainer.state.log_history,
        provenance=provenance(str(trainer.args.device)),
        base_digest=trainer.base_digest,
    )


def recorded_arguments(
    args: DominoTrainingArguments, config: DominoConfig, given_optimizer: str | None = None
) -> dict[str, Any]:
    """Return the arguments and sizes that a [`Run`] records, with plain values; those without a use are None."""
    values: dict[str, Any] = {"block_size": config.block_size, "draft_vocab_size": config.draft_vocab_size}
    values |= {name: getattr(args, name) for name in RECORDED}
    values = {name: getattr(value, "value", value) for name, value in values.items()}
    values["lr_scheduler_kwargs"] = args.lr_scheduler_kwargs or None
    values["loss_decay"] = loss_decay_of(config, args)
    if args.position_weights == "dpace":  # all positions begin with the same weight
        values["loss_decay"] = None
    if args.muon_learning_rate is not None:
        values |= {"optim": MUON, **dict.fromkeys(OF_ADAMW)}
    if given_optimizer is not None:
        values |= {"optim": given_optimizer, **dict.fromkeys(OF_ADAMW)}
    return values


def texts_of(trainer: Any) -> dict[str, Text]:
    """Return what a [`Run`] records of the texts of a trainer."""
    texts = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
    return {use: text_of(rows) for use, rows in texts.items() if rows is not None}


def text_of(rows: Any) -> Text:
    """Return how many examples a data set, a stream or a dictionary of data sets has, as far as it is known."""
    parts = list(rows.values()) if isinstance(rows, dict) else [rows]
    counts = RowCounts.sum(getattr(part, "counts", RowCounts()) for part in parts)
    examples = None
    if all(hasattr(part, "__len__") for part in parts):
        examples = sum(map(len, parts))
    names = [getattr(part, "dataset_name", None) for part in parts]
    return Text(examples, counts.tokens or None, counts.left_out, next(filter(None, names), None), _digest(parts))


def _digest(parts: Sequence[Any]) -> str | None:
    """Return a digest of evenly spaced examples, or None if they were not read by this package."""
    read = [part.rows if isinstance(part, CachedRows) else part for part in parts]  # without hidden states
    if not all(isinstance(part, RowDataset) for part in read):
        return None
    digest = hashlib.sha256()
    for part in read:
        count = min(len(part), DIGESTED_EXAMPLES)
        for place in range(count):
            example = part[place * len(part) // count]
            digest.update(repr([*map(int, example["input_ids"]), *map(int, example["loss_mask"])]).encode())
    return digest.hexdigest()[:16]


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

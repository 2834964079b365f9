"""The model card of a drafter: how it was trained, from what the trainer recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerState

from hf_domino.configuration import DominoConfig
from hf_domino.provenance import provenance
from hf_domino.training.arguments import DominoTrainingArguments

TEMPLATE = Path(__file__).with_name("card.md")
WHAT = {"domino": "A Domino drafter (arXiv 2605.29707)", "dflash": "A plain DFlash drafter (arXiv 2602.06036)"}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LOG_COLUMNS = (
    "step", "num_input_tokens_seen", "hours", "lambda_base", "base_loss", "corrected_loss", "acceptance_length",
)  # fmt: skip
EVALUATION = ("loss", "base_loss", "acceptance_length", "walked_acceptance_length")
SETTINGS = (
    "learning_rate", "muon_learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "num_anchors",
    "lambda_base_decay_ratio", "bf16", "seed",
)  # fmt: skip
MOST_LOG_ROWS = 12


def drafter_card(
    name: str, target: str, config: DominoConfig, training: str, metadata: Mapping[str, Any] | None = None
) -> str:
    """The card of a drafter as Markdown.

    Args:
        name (`str`): The drafter's name.
        target (`str`): Folder or Hub name of its target; of a folder only the last part is told.
        config (`DominoConfig`): The drafter's configuration.
        training (`str`): From [`training_section`].
        metadata (`Mapping`, *optional*): More fields for the head of the card, such as `license`.
    """
    on_hub = HUB_NAME.fullmatch(target) is not None and not Path(target).exists()
    head = {
        "library_name": "hf_domino",
        "base_model": target if on_hub else None,
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", config.projector_type],
    } | dict(metadata or {})
    path = target if on_hub else Path(target).name
    return TEMPLATE.read_text(encoding="utf-8").format(
        metadata=yaml.safe_dump({key: value for key, value in head.items() if value}, sort_keys=False).strip(),
        name=name,
        what=WHAT[config.projector_type],
        target=f"[{target}](https://huggingface.co/{target})" if on_hub else path,
        target_path=path,
        training=training,
    )


def training_section(state: TrainerState, facts: Mapping[str, Any] | None = None) -> str:
    """What a trainer recorded, as a section of a card: steps, tokens, hours, the loss log and the last evaluation.

    Args:
        state (`TrainerState`): Of the trainer, or read from its `trainer_state.json`.
        facts (`Mapping`, *optional*): More rows for the first table, such as the settings.
    """
    log = [entry for entry in state.log_history if "base_loss" in entry]
    evaluations = [entry for entry in state.log_history if "eval_loss" in entry]
    recorded = {
        "steps": state.global_step,
        "tokens read": state.num_input_tokens_seen or None,
        "hours": log[-1].get("hours") if log else None,
    } | dict(facts or {})
    parts = ["## Training", _table(("", ""), [(name, value) for name, value in recorded.items() if value is not None])]
    if log:
        columns = [name for name in LOG_COLUMNS if any(name in entry for entry in log)]
        rows = [[entry.get(name) for name in columns] for entry in _thinned(log)]
        parts += ["The loss log; acceptance lengths in it are teacher-forced.", _table(columns, rows)]
    if evaluations:
        last = evaluations[-1]
        figures = [(name, last[f"eval_{name}"]) for name in EVALUATION if f"eval_{name}" in last]
        parts += [f"Evaluation after step {last['step']}.", _table(("", ""), figures)]
    return "\n\n".join(parts)


def training_facts(
    args: DominoTrainingArguments, config: DominoConfig, loss_decay: float, datasets: Mapping[str, Any]
) -> dict[str, Any]:
    """Rows, settings, hardware and versions of a training that runs in this process.

    Args:
        args (`DominoTrainingArguments`): Its arguments.
        config (`DominoConfig`): The drafter's configuration.
        loss_decay (`float`): The one that is used.
        datasets (`Mapping`): Rows by their use, or None.
    """
    made = provenance(str(args.device))
    facts = {f"{name} rows": len(rows) for name, rows in datasets.items() if hasattr(rows, "__len__")}
    facts["rows per step"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    settings = {name: getattr(args, name) for name in SETTINGS} | {"loss_decay": loss_decay}
    return facts | {"block_size": config.block_size} | settings | {
        "processes": args.world_size,
        "hardware": made["hardware"],
        "versions": ", ".join(f"{name} {made[name]}" for name in ("hf_domino", "torch", "transformers")),
        "date": made["date"],
    }  # fmt: skip


def _thinned(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `MOST_LOG_ROWS` entries, evenly spread, the first and the last among them."""
    count = min(len(log), MOST_LOG_ROWS)
    return [log[round(index * (len(log) - 1) / max(count - 1, 1))] for index in range(count)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_figure(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(getattr(value, "value", value))

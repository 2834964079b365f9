"""What a training that runs in this process says of itself in the drafter's card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_domino._common.provenance import provenance
from hf_domino.configuration import DominoConfig
from hf_domino.data.counts import RowCounts
from hf_domino.training.arguments import DominoTrainingArguments

NO_COUNTS = RowCounts()
SETTINGS = (
    "max_length", "packing", "chat_template_kwargs", "learning_rate", "muon_learning_rate", "lr_scheduler_type",
    "warmup_steps", "weight_decay", "lora_rank", "lora_alpha", "train_only", "num_anchors", "lambda_base_decay_ratio",
    "lambda_base_start", "position_weights", "distillation_weight", "distillation_loss", "distillation_temperature",
    "own_prefix_share", "ema_decay",
    "bf16", "seed",
)  # fmt: skip


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
    left_out = {f"{name} rows left out": getattr(rows, "counts", NO_COUNTS).left_out for name, rows in datasets.items()}
    facts |= {name: count for name, count in left_out.items() if count}
    facts["rows per step"] = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    settings = {name: getattr(args, name) for name in SETTINGS} | {"loss_decay": loss_decay}
    shape = {"block_size": config.block_size, "draft_vocab_size": config.draft_vocab_size}
    return facts | shape | settings | {
        "processes": args.world_size,
        "hardware": made["hardware"],
        "versions": ", ".join(f"{name} {made[name]}" for name in ("hf_domino", "torch", "transformers")),
        "date": made["date"],
    }  # fmt: skip

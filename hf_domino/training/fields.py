"""The fields of a training that Transformers does not have, or has with other defaults: what `hf-domino train` takes.

Apart from the arguments that use them, which need torch, so that help can list them at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hf_domino._common.dtypes import dtype_name, dtype_of


@dataclass
class ModelArguments:
    """Which target, and whether to go on with what exists."""

    target: str | None = field(default=None, metadata={"help": "Folder or Hub name of the target."})
    target_dtype: str = field(default="auto", metadata={"help": "dtype of the target: auto, float32, bfloat16."})
    drafter: str | None = field(default=None, metadata={"help": "A drafter to train further, instead of a new one."})
    start_from_target: bool = field(
        default=False, metadata={"help": "Begin a new drafter with the weights of the target's last layers."}
    )
    overwrite: bool = field(default=False, metadata={"help": "Start again where output_dir holds an earlier run."})
    target_device_map: str | None = field(
        default=None, metadata={"help": "Where the target's parts go, such as auto; the training device if unset."}
    )
    cache_hidden_states: str | None = field(
        default=None, metadata={"help": "Folder for the target's hidden states, run once instead of every epoch."}
    )
    cache_dtype: str = field(
        default="bfloat16", metadata={"help": "What they are stored in: bfloat16, float16, float32, or auto."}
    )

    def __post_init__(self) -> None:
        for name in ("target_dtype", "cache_dtype"):
            setattr(self, name, value := dtype_name(getattr(self, name)))
            if value != "auto":
                dtype_of(value, name, "Choose one of them, or auto.")


@dataclass
class DataArguments:
    """What to train on."""

    train_file: str | None = field(default=None, metadata={"help": "A .jsonl, .json, .parquet or text file."})
    train_dataset: str | None = field(
        default=None, metadata={"help": "In place of it, a data set: Hub name, name:config, or folder."}
    )
    train_split: str | None = field(default=None, metadata={"help": "Of train_dataset; train, if there are several."})
    max_train_rows: int | None = field(
        default=None, metadata={"help": "Most records to read; of a Hub data set, no more is loaded then."}
    )
    eval_file: str | None = field(default=None, metadata={"help": "Like train_file, for evaluation."})
    eval_dataset: str | None = field(default=None, metadata={"help": "Like train_dataset, for evaluation."})
    eval_split: str | None = field(default=None, metadata={"help": "Of eval_dataset."})
    max_eval_rows: int | None = field(default=None, metadata={"help": "Most records of the evaluation to read."})
    evaluation_leaks: Literal["drop", "error", "keep"] = field(
        default="drop", metadata={"help": "Training rows with 13 tokens of evaluation text: drop, error or keep."}
    )
    drop_duplicates: bool = field(default=False, metadata={"help": "Leave out training rows equal to earlier ones."})
    on_policy: bool = field(default=False, metadata={"help": "Let the target write the supervised part of every row."})
    on_policy_prompt_length: int = field(default=64, metadata={"help": "Tokens of plain text to use as a prompt."})
    on_policy_max_new_tokens: int = field(default=256, metadata={"help": "Longest text of the target, in tokens."})
    on_policy_temperatures: list[float] = field(
        default_factory=lambda: [0.0, 0.7, 1.0], metadata={"help": "Temperatures of its batches in turn; 0 is greedy."}
    )
    on_policy_batch_size: int = field(default=64, metadata={"help": "Prompts per batch."})


@dataclass
class DrafterArguments:
    """Shape of a new drafter; what is left out is chosen by [`DominoConfig.for_target`]."""

    num_hidden_layers: int | None = field(default=None, metadata={"help": "Layers of the backbone."})
    intermediate_size: int | None = field(default=None, metadata={"help": "Width of the MLPs."})
    block_size: int | None = field(default=None, metadata={"help": "Positions of a block, anchor included."})
    projector_type: str | None = field(
        default=None, metadata={"help": "domino, dflash (without its head), medusa or eagle3."}
    )
    gru_hidden_dim: int | None = field(default=None, metadata={"help": "Width of the prefix state."})
    emb_dim: int | None = field(default=None, metadata={"help": "Low rank of the correction head."})
    pure_draft_prefix_len: int | None = field(default=None, metadata={"help": "Proposals that are not corrected."})
    shift_label: bool | None = field(default=None, metadata={"help": "Block position k predicts the token after it."})
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "Draft among so many tokens, the most frequent of the training text."}
    )
    mask_token_id: int | None = field(default=None, metadata={"help": "Token whose embedding fills the block."})
    target_layer_ids: list[int] | None = field(default=None, metadata={"help": "Target layers that are read."})

    def overrides(self) -> dict[str, Any]:
        """The fields that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class TrainingFields:
    """How to train; described in [`DominoTrainingArguments`], which adds the rest of Transformers' fields."""

    max_length: int = field(default=2048, metadata={"help": "Longest row, in tokens."})
    packing: bool = field(default=False, metadata={"help": "Pack short rows into rows of max_length."})
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": """JSON for the chat template, such as '{"enable_thinking": false}'."""}
    )
    num_anchors: int = field(default=256, metadata={"help": "Most blocks trained per sequence and step."})
    loss_decay: float | None = field(default=None, metadata={"help": "Positions after which a weight falls to 1/e."})
    lambda_base_decay_ratio: float = field(
        default=1.0, metadata={"help": "Share of training that fades the base loss out."}
    )
    lambda_base_start: float = field(default=1.0, metadata={"help": "Weight of the base loss at the first step."})
    position_weights: str = field(
        default="decay", metadata={"help": "decay, or dpace for weights that follow what limits acceptance."}
    )
    dpace_alpha: float = field(default=0.5, metadata={"help": "Smoothing of dpace's weights."})
    own_prefix_share: float = field(default=0.0, metadata={"help": "Share of blocks whose prefix the drafter writes."})
    ema_decay: float | None = field(default=None, metadata={"help": "Average weights: share that a step keeps."})
    distillation_weight: float = field(
        default=1.0, metadata={"help": "Share of the loss that compares with the target's law."}
    )
    distillation_loss: str = field(default="kl", metadata={"help": "kl, or tv for total variation."})
    distillation_temperature: float = field(default=1.0, metadata={"help": "Temperature of both laws there."})
    max_logits_per_chunk: int | None = field(
        default=None, metadata={"help": "Most logits held at once: 2**25, less on a CPU if unset."}
    )
    muon_learning_rate: float | None = field(
        default=0.02, metadata={"help": "Rate of Muon for matrices; 0 for AdamW alone, as adapters have it."}
    )
    shard_target: bool = field(
        default=False, metadata={"help": "Divide the target's layers among the processes, in place of a copy in each."}
    )
    walk_rows: int = field(default=16, metadata={"help": "Evaluation rows to walk in real rounds; 0 for none."})
    lora_rank: int | None = field(default=None, metadata={"help": "Train LoRA of this rank over the drafter."})
    lora_alpha: int | None = field(default=None, metadata={"help": "LoRA counts alpha / rank times; twice by default."})
    train_only: str | None = field(default=None, metadata={"help": "head, to leave the backbone as it is."})
    predict_speed_up: bool = field(
        default=True, metadata={"help": "Measure what a round costs here, once, and log the speed-up that follows."}
    )

    learning_rate: float = field(default=2e-3, metadata={"help": "Peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Learning rate schedule."})
    warmup_steps: float = field(default=0.04, metadata={"help": "Warm-up steps, or a share of all steps below 1."})
    num_train_epochs: float = field(default=6.0, metadata={"help": "Passes over the training rows."})
    logging_steps: float = field(
        default=0.05, metadata={"help": "Steps between lines of the log, or a share of all steps below 1."}
    )

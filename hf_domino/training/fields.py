"""The fields of a training that Transformers does not have, or has with other defaults: what `hf-domino train` takes.

Apart from the arguments that use them, which need torch, so that help can list them at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_domino._common.dtypes import dtype_name, dtype_of
from hf_domino._common.options import option


@dataclass
class ModelArguments:
    """Which target, and whether to go on with what exists."""

    target: str | None = option(None, "Folder or Hub name of the target.")
    target_dtype: str = option(
        "auto", "dtype of the target: float32, bfloat16, or auto, the saved one where the device is fast in 16 bits."
    )
    drafter: str | None = option(None, "A drafter to train further, instead of a new one.")
    start_from_target: bool | None = option(
        None, "Begin a new drafter with the weights of the target's last layers (default: with minutes, if they fit)."
    )
    overwrite: bool = option(False, "Start again where output_dir holds an earlier run.")
    cache_hidden_states: str | None = option(
        None, "Folder for the target's hidden states, run once instead of every epoch."
    )
    cache_dtype: str = option("bfloat16", "What they are stored in: bfloat16, float16, float32, or auto.")

    def __post_init__(self) -> None:
        for name in ("target_dtype", "cache_dtype"):
            setattr(self, name, value := dtype_name(getattr(self, name)))
            if value != "auto":
                dtype_of(value, name, "Choose one of them, or auto.")


@dataclass
class DataArguments:
    """What to train on."""

    train_file: str | None = option(
        None,
        "A .jsonl, .json or .parquet file, a folder, or a data set's Hub name, name:config.",
    )
    train_split: str | None = option(None, "Of a data set; train, if there are several.")
    max_train_rows: int | None = option(None, "Most records to read; of a Hub data set, no more is loaded then.")
    eval_file: str | None = option(None, "Like train_file, for evaluation.")
    eval_split: str | None = option(None, "Like train_split.")
    max_eval_rows: int | None = option(None, "Most records of the evaluation to read.")


@dataclass
class DrafterArguments:
    """Shape of a new drafter; what is left out is chosen by [`DominoConfig.for_target`]."""

    num_hidden_layers: int | None = option(None, "Layers of the backbone.")
    intermediate_size: int | None = option(None, "Width of the MLPs.")
    block_size: int | None = option(None, "Positions of a block, anchor included.")
    projector_type: str | None = option(None, "domino, dflash, dspark, dflash2, dfly, xpress or eagle3.")
    gru_hidden_dim: int | None = option(None, "Width of the prefix state.")
    emb_dim: int | None = option(None, "Low rank of the correction head.")
    markov_rank: int | None = option(None, "Rank of DSpark's head.")
    markov_head_type: str | None = option(None, "Of DSpark: vanilla, gated or rnn.")
    selector_rank: int | None = option(None, "Rank of DFlash 2's head.")
    xpress_rank: int | None = option(None, "Rank of XPress's head.")
    conv_kernel_size: int | None = option(None, "Positions that a block's convolutions sum up.")
    layer_fusion: bool | None = option(None, "Each layer reads captured layers by weights of its own.")
    pure_draft_prefix_len: int | None = option(None, "Proposals that are not corrected.")
    shift_label: bool | None = option(None, "Block position k predicts the token after it.")
    draft_vocab_size: int | None = option(None, "Draft among so many tokens, the most frequent of the training text.")
    draft_window_size: int | None = option(
        None, "Positions before the anchor that a draft sees of a text (default: max_length)."
    )
    mask_token_id: int | None = option(None, "Token whose embedding fills the block.")
    target_layer_ids: list[int] | None = option(None, "Target layers that are read.")  # noqa: RUF009

    def overrides(self) -> dict[str, Any]:
        """The fields that were given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class TrainingFields:
    """How to train, apart from the other fields of Transformers, which [`DominoTrainingArguments`] adds."""

    max_length: int = option(2048, "Longest row, in tokens; longer ones are cut.")
    chat_template_kwargs: dict[str, Any] | str | None = option(  # noqa: RUF009
        None, """Variables of the chat template as it will be used, as JSON: '{"enable_thinking": false}'."""
    )
    minutes: float | None = option(
        None,
        "Train for about so many minutes, loading and evaluation included. A few steps are timed first, to choose "
        "max_steps, and per_device_train_batch_size and num_anchors up to what these say. It takes the place of "
        "max_steps and num_train_epochs; a new drafter has blocks of 8 and, in few steps, twice Muon's usual rate.",
    )
    num_anchors: int = option(256, "Most blocks trained per sequence and step.")
    loss_decay: float | None = option(
        None, "Positions after which a loss weight has fallen to 1/e (default: 7 for blocks of 16, 5 for 10, 4 for 8)."
    )
    lambda_base_decay_ratio: float = option(
        1.0,
        "Share of training over which the base loss gives way to the corrected loss. Too small a share is the known "
        "way to a Domino that is worse than DFlash.",
    )
    lambda_base_start: float = option(
        1.0, "Weight of the base loss at the first step, in [0, 1]; below 1 for a drafter that is trained further."
    )
    position_weights: str = option(
        "decay",
        "decay, or dpace for weights that follow what limits acceptance now (arXiv 2605.18810), in training, in place "
        "of loss_decay.",
    )
    distillation_weight: float = option(
        1.0,
        "Share of the cross-entropy with the text's tokens, in [0, 1], that gives way to the divergence from the "
        "target's distribution of each, KL(target || drafter). Not in evaluation. Above 0 it costs one more product "
        "with lm_head.",
    )
    muon_learning_rate: float | None = option(
        0.02,
        "Train the matrices of the backbone and the GRU with Muon at this rate, in units of AdamW's, and the rest with "
        "AdamW at learning_rate. It learns in about a third of the steps. 0 for AdamW alone, which is what trainings "
        "with another optim have by default.",
    )
    walk_rows: int = option(16, "Evaluation rows over which the acceptance of real rounds is walked; 0 for none.")
    train_only: str | None = option(
        None,
        "head, to train the correction head over a backbone that stays as it is. The base loss cannot fall then, so "
        "the corrected loss is trained from the first step.",
    )
    use_peft: bool = option(
        False,
        "Train a LoRA adapter over --drafter, a folder or a name on the Hub, and save it as PEFT does. Nothing else is "
        "trained or saved. Needs the package peft.",
    )
    lora_r: int | None = option(None, "Rank of LoRA; 16 with use_peft.")
    lora_alpha: int | None = option(None, "LoRA is scaled by lora_alpha / lora_r; 32 with use_peft.")
    lora_dropout: float | None = option(None, "Dropout in front of LoRA, in [0, 1); 0 with use_peft.")
    lora_target_modules: list[str] | None = option(  # noqa: RUF009
        None,
        "Names of the layers that get LoRA, or how these names end, such as q_proj; with use_peft every linear layer "
        "of the drafter, the head's too.",
    )

    learning_rate: float = option(2e-3, "Peak learning rate of AdamW.")
    lr_scheduler_type: str = option("cosine", "Learning rate schedule.")
    warmup_steps: float = option(0.04, "Warm-up steps, or a share of all steps below 1.")
    num_train_epochs: float = option(6.0, "Passes over the training rows.")
    logging_steps: float = option(0.05, "Steps between lines of the log, or a share of all steps below 1.")

    @property
    def is_static(self) -> bool:
        """Whether shapes are to be the same in all steps: not without arguments that know the device."""
        return False


# What a card tells of a run.
RECORDED = (
    *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "seed", "bf16"),
    *("optim", "weight_decay"),
    *(field.name for field in fields(TrainingFields) if field.name != "use_peft"),  # which those below it tell
)

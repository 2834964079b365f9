"""Options of `hf-domino train` that Transformers does not have, or has with other defaults.

They stand apart from [`DominoTrainingArguments`], which imports torch, so that `--help` can list them quickly.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_domino._common.dtypes import dtype_name, dtype_of
from hf_domino._common.options import option


@dataclass
class ModelArguments:
    """Which target to train for, and which drafter or run to continue."""

    target: str | None = option(None, "Folder or Hub name of the target.")
    target_dtype: str = option(
        "auto", "dtype to load the target in: float32, bfloat16, or auto, which fits the device."
    )
    drafter: str | None = option(None, "Folder or Hub name of a drafter to train further, instead of a new one.")
    start_from_target: bool | None = option(
        None, "Start a new drafter as a copy of the target's last layers (default: with minutes, if they fit)."
    )
    trust_remote_code: bool = option(
        False, "Run the code that comes with the target, which Transformers asks for; read it first."
    )
    overwrite: bool = option(False, "Start again if output_dir holds an earlier run, instead of continuing it.")
    cache_hidden_states: str | None = option(
        None, "Folder for the target's hidden states, so that the target runs only once and not in every epoch."
    )
    cache_dtype: str = option(
        "bfloat16", "dtype in which to store these hidden states: bfloat16, float16, float32 or auto."
    )

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
        "A .jsonl, .json or .parquet file, a folder of them, or a data set on the Hub, NAME or NAME:CONFIG.",
    )
    train_split: str | None = option(None, "Split of the data set to read (default: train, if there are several).")
    max_train_rows: int | None = option(
        None, "Read at most this many records, and download no more of a data set on the Hub."
    )
    eval_file: str | None = option(None, "Held-out records for evaluation, given like train_file.")
    eval_split: str | None = option(None, "Split to read for evaluation, like train_split.")
    max_eval_rows: int | None = option(None, "Read at most this many records for evaluation.")


@dataclass
class DrafterArguments:
    """Shape of a new drafter; [`DominoConfig.for_target`] chooses the fields that are left out."""

    num_hidden_layers: int | None = option(None, "Number of layers in the backbone.")
    intermediate_size: int | None = option(None, "Width of the backbone's MLPs.")
    block_size: int | None = option(None, "Number of positions in a block, anchor included.")
    projector_type: str | None = option(
        None, "Drafting method: domino, dflash, dspark, dflash2, dfly, xpress or eagle3."
    )
    gru_hidden_dim: int | None = option(None, "Width of Domino's GRU, which reads the tokens chosen so far.")
    emb_dim: int | None = option(None, "Rank of Domino's correction head.")
    markov_rank: int | None = option(None, "Rank of DSpark's head.")
    markov_head_type: str | None = option(None, "Form of DSpark's head: vanilla, gated or rnn.")
    selector_rank: int | None = option(None, "Rank of DFlash 2's head.")
    xpress_rank: int | None = option(None, "Rank of XPress's head.")
    conv_kernel_size: int | None = option(None, "Number of positions of a block that each convolution combines.")
    layer_fusion: bool | None = option(
        None, "Let each layer of the backbone weight the captured layers of the target in its own way."
    )
    pure_draft_prefix_len: int | None = option(
        None, "Number of proposals at the start of a block that the head leaves uncorrected."
    )
    shift_label: bool | None = option(
        None, "Let each position of a block predict the token after it, instead of its own."
    )
    draft_vocab_size: int | None = option(
        None, "Propose only this many tokens: those most frequent in the training text."
    )
    draft_window_size: int | None = option(
        None, "Number of positions before the anchor that the drafter sees (default: max_length)."
    )
    mask_token_id: int | None = option(
        None, "ID of the token whose embedding stands at the masked positions of a block."
    )
    target_layer_ids: list[int] | None = option(None, "Layers of the target that the drafter reads.")  # noqa: RUF009

    def overrides(self) -> dict[str, Any]:
        """Return the fields that were set."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class TrainingFields:
    """How to train; [`DominoTrainingArguments`] adds the other fields of Transformers."""

    max_length: int = option(2048, "Longest example, in tokens; longer ones are cut.")
    chat_template_kwargs: dict[str, Any] | str | None = option(  # noqa: RUF009
        None,
        """Variables for the chat template, in the mode that you will use, as JSON: '{"enable_thinking": false}'.""",
    )
    dataset_num_proc: int | None = option(None, "Number of processes that tokenize the records (default: one).")
    minutes: float | None = option(
        None,
        "Finish in about this many minutes, loading and evaluation included. Small steps are timed to choose steps, "
        "rows and blocks, up to per_device_train_batch_size and num_anchors. Replaces max_steps and num_train_epochs. "
        "A new drafter has blocks of 8.",
    )
    num_anchors: int = option(256, "Train on at most this many blocks of each example in a step.")
    loss_decay: float | None = option(
        None,
        "Number of positions after which the weight of a position in the loss has fallen to 1/e (default: 7 for "
        "blocks of 16, 5 for 10, 4 for 8).",
    )
    lambda_base_decay_ratio: float = option(
        1.0,
        "Share of the training, in [0, 1], during which the weight of the base loss falls to 0. If it is too "
        "small, Domino can end up worse than DFlash.",
    )
    lambda_base_start: float = option(
        1.0,
        "Weight of the base loss at the first step, in [0, 1]. Lower it for a drafter that is trained further.",
    )
    position_weights: str = option(
        "decay",
        "How the training loss weights the positions of a block: decay, by loss_decay, or dpace, by how much a "
        "position limits acceptance at the moment (arXiv 2605.18810).",
    )
    distillation_weight: float = option(
        1.0,
        "Share of the training loss, in [0, 1], that compares with the target's distribution, KL(target || "
        "drafter), and not with the token of the text. Above 0, a step needs one more product with lm_head.",
    )
    muon_learning_rate: float | None = option(
        0.02,
        "Learning rate of Muon, in units of AdamW's. Muon trains the matrices of the backbone and the GRU in about "
        "a third of the steps, and AdamW the rest at learning_rate. 0 turns Muon off, which is the default if you "
        "name another optim.",
    )
    walk_rows: int = option(
        16, "Number of evaluation examples on which rounds are simulated to measure the acceptance length; 0 for none."
    )
    train_only: str | None = option(
        None,
        "head trains only the correction head and leaves the backbone as it is. The base loss cannot fall then, so "
        "only the corrected loss is trained.",
    )
    use_peft: bool = option(
        False,
        "Train a LoRA adapter over --drafter, which must be a folder or a Hub name, and save it in PEFT's format. "
        "Nothing else is trained or saved. Needs the package peft.",
    )
    lora_r: int | None = option(None, "Rank of the adapter (default with use_peft: 16).")
    lora_alpha: int | None = option(None, "The adapter is scaled by lora_alpha / lora_r (default with use_peft: 32).")
    lora_dropout: float | None = option(None, "Dropout in front of the adapter, in [0, 1) (default with use_peft: 0).")
    lora_target_modules: list[str] | None = option(  # noqa: RUF009
        None,
        "Layers that get LoRA, by their names or the ends of these, such as q_proj (default with use_peft: every "
        "linear layer, those of the head included).",
    )

    learning_rate: float = option(2e-3, "Peak learning rate of AdamW.")
    lr_scheduler_type: str = option("cosine", "Shape of the learning-rate schedule.")
    warmup_steps: float = option(0.04, "Number of warm-up steps or, below 1, their share of all steps.")
    num_train_epochs: float = option(6.0, "Number of passes over the training examples.")
    logging_steps: float = option(
        0.05, "Number of steps between lines of the log or, below 1, their share of all steps."
    )

    @property
    def is_static(self) -> bool:
        """Whether all steps have the same shapes: False here, because these fields do not know the device."""
        return False


# Arguments that only AdamW reads, not Muon with the AdamW beside it.
OF_ADAMW = ("optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")
# The arguments that the record of a run holds and that its card lists.
RECORDED = (
    *("max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "seed", "data_seed"),
    *("bf16", "fp16", "optim", *OF_ADAMW, "weight_decay"),
    *("max_grad_norm", "lr_scheduler_kwargs"),
    *(field.name for field in fields(TrainingFields) if field.name != "dataset_num_proc"),  # it changes no result
)

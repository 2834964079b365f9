"""`DominoTrainingArguments`: Transformers' training arguments, extended for drafters."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import is_peft_available

from hf_domino._common.errors import invalid_argument
from hf_domino._common.fields import MOST_SEED
from hf_domino._common.options import describe
from hf_domino.formats.source import INSTALL_PEFT
from hf_domino.training.fields import OF_ADAMW, TrainingFields

# Fields for training an adapter, with their defaults.
LORA = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target_modules": None}


@partial(describe, options=TrainingFields)
@dataclass
class DominoTrainingArguments(TrainingFields, TrainingArguments):
    """Training arguments for a drafter.

    The defaults worked best in this project's short training runs. The published values (arXiv 2605.29707) are in
    `paper.yaml`.

    Raises:
        ValueError: If a field is out of range.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "chat_template_kwargs"]  # read from JSON

    dataloader_pin_memory: bool = field(
        default_factory=torch.accelerator.is_available, metadata={"help": "Pin batches; on where there is a GPU."}
    )
    # A loss that is not finite ends the training, so there is nothing to filter, and filtering would make every step
    # wait for the device.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "No effect: such a loss is an error."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Drafter batches carry columns of their own."})
    # Every weight is used in every step, so a search for unused ones would only cost time.
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Must stay False."})

    def __post_init__(self):
        # Without an accelerator, training runs on the CPU anyway. Setting it here makes bf16 work there, too.
        if not torch.accelerator.is_available():
            self.use_cpu = True
        for name in ("fsdp", "deepspeed"):
            variable = f"ACCELERATE_USE_{name.upper()}"
            if getattr(self, name) or os.environ.get(variable) == "true":
                remedy = "Leave it out: a drafter fits on one device, and every process has its own."
                raise invalid_argument(name, "left out", getattr(self, name) or f"{variable}=true", remedy)
        super().__post_init__()
        self.accelerator_config.non_blocking = self.dataloader_pin_memory
        usual = DominoTrainingArguments
        # With another optimizer or an adapter, Muon is off by default.
        has_other = self.optim != usual.optim or self.use_peft
        if self.muon_learning_rate in (0, usual.muon_learning_rate if has_other else 0):
            self.muon_learning_rate = None
        if self.muon_learning_rate is not None:
            for name in OF_ADAMW:
                if (value := getattr(self, name)) != getattr(usual, name):
                    remedy = "The AdamW beside Muon has values of its own. Set muon_learning_rate to 0 for AdamW alone."
                    raise invalid_argument(f"{name} with muon_learning_rate", "left out", value, remedy)
        self._complete_lora()
        for names, is_right, allowed in (
            ("max_length", lambda value: value >= 2, "at least 2"),
            (
                "num_anchors lora_r lora_alpha dataset_num_proc "
                "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps",
                lambda value: value >= 1,
                "at least 1",
            ),
            ("max_steps", lambda value: value == -1 or value >= 1, "at least 1, or -1 for num_train_epochs"),
            ("num_train_epochs minutes", lambda value: value > 0, "above 0"),
            ("seed data_seed", lambda value: 0 <= value <= MOST_SEED, f"in [0, {MOST_SEED}]"),
            ("neftune_noise_alpha label_smoothing_factor", lambda value: not value, "left out: it has no use here"),
            ("lora_dropout", lambda value: 0 <= value < 1, "in [0, 1)"),
            ("walk_rows learning_rate muon_learning_rate weight_decay", lambda value: value >= 0, "at least 0"),
            (
                "lambda_base_decay_ratio lambda_base_start distillation_weight",
                lambda value: 0 <= value <= 1,
                "in [0, 1]",
            ),
            ("loss_decay", lambda value: value > 0, "above 0, or None for the published value"),
            ("position_weights", lambda value: value in ("decay", "dpace"), "decay or dpace"),
            ("train_only", lambda value: value == "head", "'head' or left out"),
        ):
            for name in names.split():
                if (value := getattr(self, name)) is not None and not is_right(value):
                    raise ValueError(f"{name} must be {allowed}, got {value!r}.")
        if self.minutes is not None and self.max_steps != -1:
            raise invalid_argument("max_steps with minutes", "left out", self.max_steps, "Set one of the two.")
        if "walked" in str(self.metric_for_best_model) and not self.walk_rows:
            remedy = "Set walk_rows to 1 or more."
            raise invalid_argument(
                "metric_for_best_model with walk_rows=0", "'loss'", self.metric_for_best_model, remedy
            )
        if (self.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            remedy = "Leave it out: the context features that all layers share would lose their gradient."
            raise invalid_argument("use_reentrant in gradient_checkpointing_kwargs", False, True, remedy)
        if not isinstance(self.chat_template_kwargs or {}, dict):
            example = """Write it like '{"enable_thinking": false}'."""
            raise invalid_argument("chat_template_kwargs", "a JSON object", self.chat_template_kwargs, example)

    def _complete_lora(self) -> None:
        """Give the LoRA fields their defaults, or raise a `ValueError` if they are set but no adapter is trained."""
        for name, default in LORA.items():
            value = getattr(self, name)
            if self.use_peft:
                setattr(self, name, default if value is None else value)
            elif value is not None:
                raise invalid_argument(
                    f"{name} without use_peft", "left out", value, "Set use_peft to train an adapter."
                )
        if not self.use_peft:
            return
        for name in ("train_only", "muon_learning_rate"):
            if (value := getattr(self, name)) is not None:
                remedy = "AdamW trains the adapter, and lora_target_modules chooses its layers."
                raise invalid_argument(f"{name} with use_peft", "left out", value, remedy)
        if not is_peft_available():
            raise invalid_argument("use_peft", "False without the package peft", True, INSTALL_PEFT)

    @property
    def is_static(self) -> bool:
        """Whether all steps have the same shapes and none waits for the device: True except on a CPU."""
        return self.device.type != "cpu"

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """`chat_template_kwargs` as a mapping, which is empty if they are not set."""
        assert not isinstance(self.chat_template_kwargs, str)  # JSON was parsed when the arguments were created
        return self.chat_template_kwargs or {}

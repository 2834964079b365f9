"""`DominoTrainingArguments`: what Transformers' training arguments do not know about drafters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations import get_available_reporting_integrations

from hf_domino.compatibility import refusal
from hf_domino.training.distillation import DIVERGENCES, Distillation
from hf_domino.training.fields import TrainingFields
from hf_domino.training.losses import LossOptions

# Positions after which a loss weight has fallen to 1/e, by block size (arXiv 2605.29707, 2602.06036).
LOSS_DECAY_BY_BLOCK_SIZE = {16: 7.0, 10: 5.0, 8: 4.0}
POSITION_WEIGHTS = ("decay", "dpace")


def default_loss_decay(block_size: int) -> float:
    """The published `loss_decay` of a block size, else a little under half of it.

    Example:
    ```python
    >>> from hf_domino.training.arguments import default_loss_decay
    >>> default_loss_decay(16), default_loss_decay(12)
    (7.0, 5.4)

    ```
    """
    return LOSS_DECAY_BY_BLOCK_SIZE.get(block_size, round(0.45 * block_size, 2))


@dataclass
class DominoTrainingArguments(TrainingFields, TrainingArguments):
    """Training arguments of a drafter; the defaults follow the published recipe (arXiv 2605.29707).

    Args:
        max_length (`int`, *optional*, defaults to 2048): Longest row in tokens; longer ones are cut.
        chat_template_kwargs (`dict` or `str`, *optional*): For the chat template, as it will be used: thinking mode,
            say. As a string, JSON.
        packing (`bool`, *optional*, defaults to `False`): Pack short training rows into rows of `max_length`, each
            seen and scored as if it were alone; `num_anchors` are of a packed row then. Evaluation rows are left alone.
        num_anchors (`int`, *optional*, defaults to 256): Most blocks trained per sequence and step.
        loss_decay (`float`, *optional*): Positions after which a loss weight has fallen to 1/e. Defaults to 7 for
            blocks of 16, 5 for 10, 4 for 8.
        lambda_base_decay_ratio (`float`, *optional*, defaults to 1.0): Share of training over which the base loss gives
            way to the corrected loss. Too small a share is the known way to a Domino that is worse than DFlash.
        lambda_base_start (`float`, *optional*, defaults to 1.0): Weight of the base loss at the first step, in [0, 1];
            below 1 for a drafter that is trained further.
        position_weights (`str`, *optional*, defaults to `"decay"`): `"dpace"` for weights that follow what limits
            acceptance now (arXiv 2605.18810), in training, in place of `loss_decay`.
        dpace_alpha (`float`, *optional*, defaults to 0.5): Smoothing of those, in (0, 1].
        own_prefix_share (`float`, *optional*, defaults to 0.0): Share of the blocks, in [0, 1], in which the GRU reads
            the drafter's own greedy proposals in place of the text.
        ema_decay (`float`, *optional*): Evaluate and save an exponential average of the weights, of which each step
            keeps this share, in (0, 1); 0.999, say. Defaults to the weights of the last step.
        distillation_weight (`float`, *optional*, defaults to 0.0): Share of the cross-entropy with the text's tokens
            that gives way to the divergence from the target's law of each, in [0, 1]; in training, not in evaluation.
            Costs one more product with lm_head.
        distillation_loss (`str`, *optional*, defaults to `"kl"`): The divergence: KL(target || drafter), or `"tv"` for
            total variation.
        distillation_temperature (`float`, *optional*, defaults to 1.0): Temperature of both laws.
        max_logits_per_chunk (`int`, *optional*, defaults to 33554432): Most logits held at once; 2**25 in fp32 are
            128 MB, of which the loss keeps about four copies.
        muon_learning_rate (`float`, *optional*): Train the backbone's and the GRU's matrices with Muon at this rate, in
            units of AdamW's, and the rest with AdamW at `learning_rate`; learns in about a third of the steps. Needs
            torch 2.9. Defaults to AdamW for all.
        walk_rows (`int`, *optional*, defaults to 16): Evaluation rows over which the acceptance of real rounds is
            walked; 0 for none.
        logging_steps (`float`, *optional*, defaults to 0.05): Steps between lines of the log, or below 1 a share of all
            steps: 20 lines a training.

    Raises:
        ValueError: If a field is out of range.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "chat_template_kwargs"]  # read from JSON

    dataloader_pin_memory: bool = field(
        default_factory=torch.accelerator.is_available, metadata={"help": "Pin batches; on where there is a GPU."}
    )
    # A loss that is not finite ends training: nothing is to be filtered, and each filtered step waits for the device.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "No effect: such a loss is an error."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Drafter batches carry columns of their own."})
    # The correction head runs outside the wrapped forward: a search for unused parameters would miss it.
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "Must stay False."})

    def __post_init__(self):
        # Without an accelerator training runs on the CPU in any case; said here, bf16 works there too.
        if not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
        self._check_reports()
        for name, low, high in (
            ("max_length", 2, None),
            ("num_anchors", 1, None),
            ("lambda_base_decay_ratio", 0, 1),
            ("lambda_base_start", 0, 1),
            ("own_prefix_share", 0, 1),
            ("distillation_weight", 0, 1),
            ("max_logits_per_chunk", 1, None),
            ("walk_rows", 0, None),
        ):
            value = getattr(self, name)
            if value < low or (high is not None and value > high):
                allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
                raise ValueError(f"{name} must be {allowed}, got {value}.")
        for name, choices in (("distillation_loss", DIVERGENCES), ("position_weights", POSITION_WEIGHTS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}.")
        if (self.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            remedy = "Leave it out: the context features that all layers share would lose their gradient."
            raise refusal("use_reentrant in gradient_checkpointing_kwargs", False, True, remedy)
        if self.distillation_temperature <= 0:
            raise ValueError(f"distillation_temperature must be above 0, got {self.distillation_temperature}.")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be in (0, 1), or None for the last weights, got {self.ema_decay}.")
        if not 0 < self.dpace_alpha <= 1:
            raise ValueError(f"dpace_alpha must be in (0, 1], got {self.dpace_alpha}: at 0 all weights may vanish.")
        if not isinstance(self.chat_template_kwargs or {}, dict):
            example = """Write it like '{"enable_thinking": false}'."""
            raise refusal("chat_template_kwargs", "a JSON object", self.chat_template_kwargs, example)
        if self.loss_decay is not None and self.loss_decay <= 0:
            raise ValueError(f"loss_decay must be above 0, or None for the published value, got {self.loss_decay}.")

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """`chat_template_kwargs` as a mapping, empty where there are none."""
        assert not isinstance(self.chat_template_kwargs, str)  # JSON is read when the arguments are made
        return self.chat_template_kwargs or {}

    def loss_options(self) -> LossOptions:
        """What is trained beside the published loss."""
        weight, temperature = self.distillation_weight, self.distillation_temperature
        return LossOptions(
            Distillation(weight, temperature, self.distillation_loss) if weight else None,
            self.dpace_alpha if self.position_weights == "dpace" else None,
        )

    def _check_reports(self) -> None:
        """Refuse backends that are not installed: the trainer would, but after everything is loaded and generated."""
        # flyte is not among what Transformers looks for.
        usable = {*get_available_reporting_integrations(), "flyte"}
        if missing := [name for name in self.report_to if name not in usable]:
            expected = f"among what is installed ({', '.join(sorted(usable - {'flyte'})) or 'nothing'}) or 'none'"
            raise refusal("report_to", expected, missing[0], f"Install it (pip install {missing[0]}), or set 'none'.")

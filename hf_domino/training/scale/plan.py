"""What a training will need, before it runs: memory of each process, time, and disk, from configurations alone.

Parameters are counted on the meta device; activations from the tensors that the backward pass keeps. Rows are taken to
be full (`max_length`) and to hold all their anchors, so a plan is about the most that a step can need. Time is
arithmetic over a rate of matrix products that was measured or given, and so a lower bound.

Shapes: C context positions, Q block positions, M scored positions, H hidden size, A width of queries, E width of keys,
F width of MLPs, L captured layers, G width of the prefix state, R low rank, D tokens that are drafted. All per process
and step.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.target.loading import AutoTarget
from hf_domino.training.arguments import DominoTrainingArguments

FP32 = 4  # bytes
# Bytes of optimizer state per parameter: two moments in fp32, or none; one for Muon.
STATE_BYTES = {"adamw_torch": 8, "adamw_torch_fused": 8, "sgd": 0}
ADAMW_BYTES, MUON_BYTES = 8, 4
# Live copies of a chunk's logits in fp32 while its gradients are made: base, correction, corrected, one normalised,
# and two gradients.
LOGITS_COPIES = 6
DISTILLED_COPIES = 4  # more of them: the target's law, and what its divergences from both laws keep
MATMUL_SIZE, MATMUL_SECONDS = 2048, 1.0


@dataclass(frozen=True)
class Sizes:
    """Parameters of a target and a drafter, counted on the meta device.

    Args:
        target (`int`): All parameters of the target.
        ends (`int`): Those of its embeddings and lm_head, counted once where they are tied.
        active (`int`): Those that a token's forward multiplies with: no embeddings, no lm_head, chosen experts only.
        drafter (`int`): All parameters of the drafter.
        matrices (`int`): Those that Muon trains.
        layer (`int`): Those of one layer of the backbone.
        dtype (`torch.dtype`): Of the target.
    """

    target: int
    ends: int
    active: int
    drafter: int
    matrices: int
    layer: int
    dtype: torch.dtype


@dataclass(frozen=True)
class TrainingPlan:
    """What one training needs.

    Args:
        memory (`dict[str, int]`): Bytes of each process by part, all there at the fullest moment of a step.
        peak_bytes (`int`): Their sum.
        flops_per_step (`dict[str, float]`): Operations of each process in one optimizer step, by part.
        flops_per_second (`float`, *optional*): The rate that time is estimated from.
        seconds_per_step (`float`, *optional*): None without a rate.
        steps (`int`, *optional*): Optimizer steps; None where the number of rows is not known.
        hours (`float`, *optional*): Of all steps, evaluation and saving aside.
        hidden_states_bytes_per_token (`int`): On disk, in bf16, where hidden states are cached.
        hidden_states_bytes (`int`, *optional*): Of all rows.
        checkpoint_bytes (`int`): Of one checkpoint.
    """

    memory: dict[str, int]
    peak_bytes: int
    flops_per_step: dict[str, float]
    flops_per_second: float | None
    seconds_per_step: float | None
    steps: int | None
    hours: float | None
    hidden_states_bytes_per_token: int
    hidden_states_bytes: int | None
    checkpoint_bytes: int


def plan_training(
    target_config: PreTrainedConfig,
    config: DominoConfig,
    args: DominoTrainingArguments,
    *,
    target_dtype: torch.dtype | None = None,
    num_rows: int | None = None,
    num_processes: int = 1,
    flops_per_second: float | None = None,
) -> TrainingPlan:
    """Estimate memory, time and disk of a training.

    Args:
        target_config (`PreTrainedConfig`): Of the target.
        config (`DominoConfig`): Of the drafter.
        args (`DominoTrainingArguments`): Of the training.
        target_dtype (`torch.dtype`, *optional*): Defaults to the configuration's own, else fp32.
        num_rows (`int`, *optional*): Training rows; without them and `max_steps` there is no total.
        num_processes (`int`, *optional*, defaults to 1): Of one device each.
        flops_per_second (`float`, *optional*): Of one device, as of [`measure_flops`]; without it there is no time.

    Raises:
        ValueError: If the state of the chosen optimizer is not known.

    Example:
    ```python
    >>> from tempfile import TemporaryDirectory
    >>> from transformers import Qwen3Config
    >>> from hf_domino import DominoConfig
    >>> from hf_domino.training import DominoTrainingArguments
    >>> from hf_domino.training.scale.plan import plan_training
    >>> target_config = Qwen3Config(hidden_size=256, num_hidden_layers=8, vocab_size=1000)
    >>> with TemporaryDirectory() as folder:
    ...     args = DominoTrainingArguments(folder, use_cpu=True, report_to="none")
    >>> plan = plan_training(target_config, DominoConfig.for_target(target_config), args)
    >>> plan.memory["gradients (fp32)"] == plan.memory["drafter (fp32)"], plan.hours
    (True, None)

    ```
    """
    config.kind.refuse_what_it_lacks("plan")
    sizes = count_sizes(target_config, config, target_dtype)
    shape = _Shape(config, args, sizes.dtype)
    memory = _memory(sizes, shape, args, num_processes)
    flops = _flops(sizes, shape, target_config, args)
    seconds = sum(flops.values()) / flops_per_second if flops_per_second else None
    steps = _num_steps(args, num_rows, num_processes)
    captured = shape.states * torch.bfloat16.itemsize
    return TrainingPlan(
        memory=memory,
        peak_bytes=sum(memory.values()),
        flops_per_step=flops,
        flops_per_second=flops_per_second,
        seconds_per_step=seconds,
        steps=steps,
        hours=seconds * steps / 3600 if seconds and steps else None,
        hidden_states_bytes_per_token=captured,
        hidden_states_bytes=captured * num_rows * shape.length if num_rows else None,
        checkpoint_bytes=FP32 * sizes.drafter + _optimizer_bytes(sizes, args),
    )


def count_sizes(target_config: PreTrainedConfig, config: DominoConfig, dtype: torch.dtype | None = None) -> Sizes:
    """Count parameters without loading or making any.

    Args:
        target_config (`PreTrainedConfig`): Of the target.
        config (`DominoConfig`): Of the drafter.
        dtype (`torch.dtype`, *optional*): Of the target; defaults to the configuration's own, else fp32.
    """
    with torch.device("meta"):
        target = AutoTarget.from_config(target_config)
        drafter = DominoDraftModel(config)
    ends = {weight for end in (target.get_input_embeddings(), target.get_output_embeddings()) for weight in _of(end)}
    text = target_config.get_text_config(decoder=True)
    experts = sum(weight.numel() for name, weight in target.named_parameters() if ".experts." in name)
    num_experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 1
    chosen = min(1.0, (getattr(text, "num_experts_per_tok", None) or num_experts) / num_experts)
    total, num_ends = sum(weight.numel() for weight in target.parameters()), sum(weight.numel() for weight in ends)
    named = drafter.named_parameters()
    return Sizes(
        target=total,
        ends=num_ends,
        active=total - num_ends - round(experts * (1 - chosen)),
        drafter=sum(weight.numel() for weight in drafter.parameters()),
        matrices=sum(weight.numel() for name, weight in named if weight.ndim == 2 and "embed" not in name),
        layer=sum(weight.numel() for weight in _of(drafter.layers[0])),
        dtype=dtype or getattr(target_config, "dtype", None) or getattr(text, "dtype", None) or torch.float32,
    )


def measure_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of square matrix products, the best of about a second of them.

    Args:
        device (`torch.device`): Where to multiply.
        dtype (`torch.dtype`): Of the matrices.
    """
    own = torch.Generator(device)  # nobody else's numbers change
    left, right = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device=device, generator=own).to(dtype)
    best, until = math.inf, time.monotonic() + MATMUL_SECONDS
    while best == math.inf or time.monotonic() < until:
        start = time.monotonic()
        product = left @ right
        product[0, 0].item()  # waits for the device
        best = min(best, time.monotonic() - start)
    return 2 * MATMUL_SIZE**3 / best


class _Shape:
    """Positions of one micro-batch, and the widths that they have."""

    def __init__(self, config: DominoConfig, args: DominoTrainingArguments, target_dtype: torch.dtype):
        rows = args.per_device_train_batch_size
        self.config, self.rows, self.length = config, rows, min(args.max_length, config.max_position_embeddings)
        self.context = rows * self.length
        self.block = rows * args.num_anchors * config.block_size
        self.logits = min(args.logits_per_chunk(config.draft_width), self.block * config.draft_width)
        self.width = 2 if args.bf16 or args.fp16 else FP32  # bytes of what autocast computes in
        self.target_width = target_dtype.itemsize
        self.queries = config.num_attention_heads * config.head_dim
        self.keys = config.num_key_value_heads * config.head_dim
        self.captured = len(config.target_layer_ids or ()) * config.hidden_size
        self.is_distilled = args.distillation_weight > 0
        self.states = self.captured + config.hidden_size * self.is_distilled  # the final one too


def _memory(sizes: Sizes, shape: _Shape, args: DominoTrainingArguments, num_processes: int) -> dict[str, int]:
    """Bytes by part. What is divided among processes counts its share, and what is gathered of it for a moment."""
    share = num_processes if args.fsdp else 1
    target_share = num_processes if args.shard_target else 1
    weights = FP32 * sizes.drafter
    # At the root of the sharded drafter everything outside its layers is gathered for the whole step.
    gathered = FP32 * (sizes.drafter - sizes.layer * (shape.config.num_hidden_layers - 1)) if share > 1 else 0
    # DistributedDataParallel keeps gradients a second time, in the buckets that it sends.
    buckets = weights if num_processes > 1 and share == 1 else 0
    inner = sizes.target - sizes.ends
    layer_of_target = inner // max(shape.config.num_target_layers or 1, 1) if target_share > 1 else 0
    copies = LOGITS_COPIES + DISTILLED_COPIES * shape.is_distilled
    return {
        f"target ({str(sizes.dtype).removeprefix('torch.')})": shape.target_width
        * (sizes.ends + inner // target_share + layer_of_target),
        **_rows_of_head(shape),
        "drafter (fp32)": weights // share + gathered,
        "gradients (fp32)": weights // share + buckets,
        "optimizer": _optimizer_bytes(sizes, args) // share,
        **({"average of the weights (fp32)": weights} if args.ema_decay is not None else {}),
        "hidden states of the target": shape.context * shape.states * (shape.target_width + shape.width),
        "activations": _activations(shape, args.gradient_checkpointing),
        "logits of a chunk": copies * FP32 * shape.logits,
    }


def _rows_of_head(shape: _Shape) -> dict[str, int]:
    """The rows of lm_head that a draft vocabulary keeps; nothing without one."""
    if shape.config.draft_vocab_size is None:
        return {}
    return {"lm_head of the draft vocabulary": shape.target_width * shape.config.draft_width * shape.config.hidden_size}


def _optimizer_bytes(sizes: Sizes, args: DominoTrainingArguments) -> int:
    if args.muon_learning_rate is not None:
        return MUON_BYTES * sizes.matrices + ADAMW_BYTES * (sizes.drafter - sizes.matrices)
    name = str(getattr(args.optim, "value", args.optim))
    if name not in STATE_BYTES:
        remedy = "Plan with adamw_torch, whose state is among the largest."
        raise refusal("optim", f"among {', '.join(STATE_BYTES)} for a plan", name, remedy)
    return STATE_BYTES[name] * sizes.drafter


def _activations(shape: _Shape, checkpointing: bool) -> int:
    """Bytes that the backward pass of the drafter reads, apart from what logits need.

    With gradient checkpointing, one layer at a time, and the input of the others. Norms keep their input and its
    normalised form in fp32, products keep their input in the width they compute in.
    """
    config, width, block, context = shape.config, shape.width, shape.block, shape.context
    hidden, mlp = config.hidden_size, config.intermediate_size
    norm = 2 * FP32 + width
    by_query = 2 * norm * hidden + (2 * FP32 + width) * shape.queries + 2 * width * shape.queries + 4 * width * mlp
    by_key = width * hidden + (2 * FP32 + 2 * width) * shape.keys
    layer = block * by_query + (context + block) * by_key
    ends = context * norm * hidden + block * (norm + 2 * FP32) * hidden
    if config.kind.has_correction_head:
        # The GRU keeps its input, three gates from each side, and its states.
        ends += block * FP32 * (hidden + 8 * config.gru_hidden_dim)
    if checkpointing:
        return layer + config.num_hidden_layers * block * FP32 * hidden + ends
    return config.num_hidden_layers * layer + ends


def _flops(
    sizes: Sizes, shape: _Shape, target_config: PreTrainedConfig, args: DominoTrainingArguments
) -> dict[str, float]:
    """Operations of one optimizer step: two per parameter and token forward, four backward."""
    config, block, context = shape.config, shape.block, shape.context
    text = target_config.get_text_config(decoder=True)
    # Scores and sums of causal attention: each position sees half of the row.
    seen = 2 * shape.context * shape.length * text.num_hidden_layers * shape.queries
    projected = block * (2 * shape.queries * config.hidden_size + 3 * config.hidden_size * config.intermediate_size)
    projected += (block + context) * 2 * shape.keys * config.hidden_size
    # A block sees half of its row on average, and itself.
    attended = 2 * block * (shape.length / 2 + config.block_size) * shape.queries
    layers = config.num_hidden_layers * (projected + attended)
    drafter = layers + context * shape.captured * config.hidden_size
    if config.kind.has_correction_head:
        state, rank = config.gru_hidden_dim, config.emb_dim
        drafter += block * (3 * state * (config.hidden_size + state) + rank * (config.hidden_size + state))
        drafter += block * rank * config.draft_width
    # The frozen lm_head has no gradient of its own; where laws are compared, it reads the target's states too.
    lm_head = (4 + 2 * shape.is_distilled) * block * config.hidden_size * config.draft_width
    again = 2.0 * layers * args.gradient_checkpointing
    parts = {"target": 2.0 * sizes.active * context + seen, "drafter": 6.0 * drafter + again, "lm_head": float(lm_head)}
    return {name: args.gradient_accumulation_steps * flops for name, flops in parts.items()}


def _num_steps(args: DominoTrainingArguments, num_rows: int | None, num_processes: int) -> int | None:
    if args.max_steps > 0:
        return args.max_steps
    if num_rows is None:
        return None
    batches = math.ceil(num_rows / (args.per_device_train_batch_size * num_processes))
    return math.ceil(args.num_train_epochs * math.ceil(batches / args.gradient_accumulation_steps))


def _of(module: nn.Module | None) -> list[nn.Parameter]:
    return [] if module is None else list(module.parameters())

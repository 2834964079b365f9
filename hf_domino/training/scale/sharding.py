"""Where weights live: the drafter's shards where several processes train, and the frozen target.

`accelerate` wraps the drafter (DDP, or FSDP2 by `fsdp`); its parts run inside the wrapped forward, which gathers them.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.training.arguments import DominoTrainingArguments


def prepare_sharding(args: DominoTrainingArguments, accelerator: Accelerator) -> None:
    """Refuse what would be ignored or fail late, and let sharding change nothing but where weights are.

    Args:
        args (`DominoTrainingArguments`): Of the training.
        accelerator (`Accelerator`): Its FSDP2 plugin, if any, gathers weights in fp32; autocast narrows them as it does
            without FSDP. By default it would also round rotary tables and losses to bf16.

    Raises:
        ValueError: If one process drives several GPUs, or if `fsdp` was asked for and would be ignored, as `accelerate`
            does on CPUs, or is of the first version.
    """
    if args.n_gpu > 1:
        raise ValueError(f"n_gpu must be at most 1 per process, got {args.n_gpu}: use torchrun, one process per GPU.")
    if accelerator.distributed_type != DistributedType.FSDP:
        if args.fsdp:
            remedy = "Leave it out: processes on CPUs train with DistributedDataParallel."
            raise refusal("fsdp", f"unset on {args.device.type}, where accelerate does not shard", args.fsdp, remedy)
        return
    if not accelerator.is_fsdp2:
        raise refusal("fsdp_config's version", 2, 1, "The first is deprecated, and no weights are gathered as it does.")
    accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy()


def check_finite(model: nn.Module, step: int) -> None:
    """Refuse weights, whole or sharded, that are not finite on any process; every process must call."""
    parameters = dict(model.named_parameters())
    locals_ = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in parameters.values()]
    broken = torch.stack([~torch.isfinite(weight.detach()).all() for weight in locals_]).int()
    if distributed.is_initialized():
        distributed.all_reduce(broken, op=distributed.ReduceOp.MAX)
    names = [name for name, is_broken in zip(parameters, broken.tolist(), strict=True) if is_broken]
    if names:
        remedy = "They are not saved. Go on from an earlier checkpoint with a lower learning rate."
        found = f"nan or inf in {', '.join(names[:3])} ({len(names)} tensors)"
        raise refusal(f"the drafter's weights after step {step}", "finite", found, remedy)


def place_target(target: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a target to a device, unless its parts were given places: by a `device_map`, offloading or sharding."""
    weights = list(target.parameters())
    is_placed = any(hasattr(module, "_hf_hook") for module in target.modules()) or any(
        weight.is_meta or hasattr(weight, "device_mesh") or weight.device != target.device for weight in weights
    )
    if not is_placed and target.device != device:
        target.to(device)
    return target


def shard_target(target: PreTrainedModel, args: DominoTrainingArguments) -> PreTrainedModel:
    """Divide the layers of a target among all processes; a layer is gathered while it runs.

    Embeddings and lm_head stay whole: they are called on their own, once per chunk of the loss.

    Args:
        target (`PreTrainedModel`): The target, on the CPU or the training device. No gradients are kept for it.
        args (`DominoTrainingArguments`): For the device and the number of processes.

    Raises:
        ValueError: If there is one process, or the target is quantised, offloaded or on several devices.
    """
    if args.world_size < 2:
        remedy = "Start one process per GPU (accelerate launch, torchrun), or leave it out."
        raise refusal("shard_target", "unset with one process", True, remedy)
    devices = {parameter.device.type for parameter in target.requires_grad_(False).parameters()}
    if getattr(target, "is_quantized", False) or not devices <= {"cpu", args.device.type}:
        remedy = "Load the target plainly, without device_map and quantization, or leave shard_target out."
        raise refusal("shard_target", "unset for a target that is placed or quantised already", True, remedy)
    mesh = init_device_mesh(args.device.type, (args.world_size,))
    ends = (target.get_input_embeddings(), target.get_output_embeddings())
    whole = {parameter for end in ends for parameter in end.to(args.device).parameters()}
    lists = [list(module) for module in target.modules() if isinstance(module, nn.ModuleList)]
    for layer in max(lists, key=len):  # the decoder's
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    return fully_shard(target, mesh=mesh, ignored_params=whole)

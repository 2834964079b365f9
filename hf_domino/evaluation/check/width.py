"""Probe whether a target computes the same logits for a few positions at once as for one position at a time.

Verification relies on this. The targets that are known to fail are on the list of unsupported targets. The probe only
finds faults on the inputs that it tries, so it can refuse further targets, but never clears a target on the list.

Shapes: W positions of the block, V vocabulary.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino.decoding.loop import decode_mode
from hf_domino.evaluation.prepared import prepared
from hf_domino.targets.compatibility import ONE_WIDTH, check_target_kind
from hf_domino.targets.view import input_device, rounded_to

PREFIX_LENGTH = 40
WIDTH = 8
# Largest difference between logits, divided by the largest logit. Tiny models of 150 families reached 9e-6 in fp32,
# 1e-6 in fp64 (where parts are computed in fp32, too), 0.013 in fp16 and 0.04 in bf16; deep models round more often.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class WidthProbe:
    """The result of the probe.

    Args:
        difference (`float`): Largest difference of logits between the block and plain decode steps, divided by the
            largest logit.
        tolerance (`float`): Largest difference that rounding explains in the target's dtype.
        num_flips (`int`): Number of positions whose argmax differs.
        excuse (`str`, *optional*): Why a larger difference can still be rounding; None if it is a fault.
    """

    difference: float
    tolerance: float
    num_flips: int
    excuse: str | None

    @property
    def agrees(self) -> bool:
        """Return whether rounding explains the difference."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{WIDTH} positions at once differ from plain decode steps by {self.difference:.2g} of the largest logit "
            f"(rounding explains {self.tolerance:.0e}), in {self.num_flips} of {WIDTH} argmaxes"
        )


def probe_width(target: PreTrainedModel, seed: int = 0) -> WidthProbe:
    """Run a few positions at once and one at a time after a cached random prefix, and compare the logits.

    If rounding does not explain the difference, it is an error in fp32 and fp64. It is only a warning in other dtypes,
    and for targets that are quantised or have experts, because rounding can choose other experts.

    Args:
        target (`PreTrainedModel`): The target as you will use it, because its dtype, attention and quantisation matter.
        seed (`int`, *optional*, defaults to 0): Seed of the tokens; the global random state is not used.

    Returns:
        [`WidthProbe`]: The measurement, which you can print.

    Raises:
        ValueError: If no drafter can serve the target anyway, or if the difference is an error.

    Example:
    ```python
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> import hf_domino
    >>> target = LlamaForCausalLM(LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    ... ))
    >>> hf_domino.probe_width(target).agrees
    True

    ```
    """
    check_target_kind(target)
    at_once, singly = _logits_both_ways(target, seed)
    scale = singly.abs().amax().clamp_min(torch.finfo(torch.float32).tiny)
    probe = WidthProbe(
        float((at_once - singly).abs().amax() / scale),
        TOLERANCES.get(rounded_to(target), max(TOLERANCES.values())),
        int((at_once.argmax(dim=-1) != singly.argmax(dim=-1)).sum()),
        _excuse(target),
    )
    if probe.agrees:
        return probe
    if probe.excuse is None:
        remedy = f"{type(target).__name__} cannot be drafted for without changing its text; drop assistant_model."
        raise invalid_argument("the target", ONE_WIDTH, str(probe), remedy)
    advice = f"{probe.excuse} Compare texts with and without assistant_model."
    warnings.warn(f"{type(target).__name__}: {probe}. {advice}", stacklevel=2)
    return probe


@torch.no_grad()
def _logits_both_ways(target: PreTrainedModel, seed: int) -> list[torch.Tensor]:
    """Return the logits `[W, V]` of the block at once and of plain decode steps."""
    text = target.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(text.vocab_size, (1, PREFIX_LENGTH + WIDTH), generator=generator).to(input_device(target))
    prefix, block = ids.split((PREFIX_LENGTH, WIDTH), dim=1)
    # `generate` prepares cache, mask and positions the way this model family needs them.
    model, prefix, _, kwargs = prepared(target, prefix, WIDTH + 1)
    return [_logits_behind(model, prefix, block, width, copy.deepcopy(kwargs)) for width in (WIDTH, 1)]


def _logits_behind(
    model: PreTrainedModel, prefix: torch.Tensor, block: torch.Tensor, width: int, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Return the logits `[W, V]` of a block after a prefix, with `width` positions of the block in each forward."""
    logits: list[torch.Tensor] = []
    for ids in (prefix, *block.split(width, dim=1)):
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=ids.shape[1], is_first_iteration=not logits, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = ids.shape[1]
        # After the prefix, experts run with the same kernels as in rounds.
        with decode_mode(model) if logits else nullcontext():
            outputs = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(
            outputs, kwargs, is_encoder_decoder=False, num_new_tokens=width
        )
        logits.append(outputs.logits[0, -width:].double())
    return torch.cat(logits[1:])


def _excuse(target: PreTrainedModel) -> str | None:
    """Return the reason why a large difference can be rounding, or None if it is a fault."""
    text = target.config.get_text_config(decoder=True)
    if any("experts" in name and isinstance(value, int) and value > 1 for name, value in text.to_dict().items()):
        return "Rounding may choose other experts."
    modules = {type(part).__module__ for part in (*target.modules(), *target.parameters())}
    if getattr(target.config, "quantization_config", None) is not None or any("quant" in name for name in modules):
        return "Quantised activations depend on what they are quantised with."
    dtype = rounded_to(target)
    if dtype not in (torch.float32, torch.float64):
        return f"{dtype} rounds coarsely."
    return None

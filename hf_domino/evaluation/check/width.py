"""The probe of a target: are a few positions at once what the same positions are one at a time.

Verification rests on it, and the list of targets that are refused has those where it is known not to hold. The probe
finds faults on the inputs it tries and no others: it adds to the list and never takes from it.

Shapes: T positions of the prefix, W of the block, V vocabulary.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.evaluation.prepared import prepared
from hf_domino.target.compatibility import ONE_WIDTH, check_target_kind
from hf_domino.target.view import input_device, rounded_to

PREFIX_LENGTH, WIDTH = 40, 8
# Largest difference of two logits over the largest logit. Measured on tiny models of 150 families: up to 9e-6 in fp32,
# 1e-6 in fp64 (parts are computed in fp32 there too), 0.013 in fp16, 0.04 in bf16; deep models add up more roundings.
TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class WidthProbe:
    """What the probe measured.

    Args:
        difference (`float`): Largest difference of logits between the block and single steps, over the largest logit.
        tolerance (`float`): What rounding explains in the target's dtype.
        num_flips (`int`): Positions whose argmax differs.
        excuse (`str`, *optional*): Why a larger difference may still be rounding; None where it is a fault.
    """

    difference: float
    tolerance: float
    num_flips: int
    excuse: str | None

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{WIDTH} positions at once differ from single steps by {self.difference:.2g} of the largest logit "
            f"(rounding explains {self.tolerance:.0e}), in {self.num_flips} of {WIDTH} argmaxes"
        )


def probe_width(target: PreTrainedModel, seed: int = 0) -> WidthProbe:
    """Run a few positions at once and one at a time behind the cache of a random prefix, and compare the logits.

    Args:
        target (`PreTrainedModel`): The target, as it will be used: its dtype, attention and quantisation count.
        seed (`int`, *optional*, defaults to 0): Seed of the tokens; the global random state is not used.

    Returns:
        [`WidthProbe`]: What was measured, printable.

    Raises:
        ValueError: For a target that is refused anyway, and in fp32 and fp64 for a difference that rounding does not
            explain. In other dtypes, where the target is quantised or has experts, which rounding may choose
            otherwise, it is a warning.

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
        raise refusal("the target", ONE_WIDTH, str(probe), remedy)
    advice = f"{probe.excuse} Compare texts with and without assistant_model."
    warnings.warn(f"{type(target).__name__}: {probe}. {advice}", stacklevel=2)
    return probe


@torch.no_grad()
def _logits_both_ways(target: PreTrainedModel, seed: int) -> list[torch.Tensor]:
    """Logits `[W, V]` of the block at once and of single steps."""
    text = target.config.get_text_config(decoder=True)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(text.vocab_size, (1, PREFIX_LENGTH + WIDTH), generator=generator).to(input_device(target))
    prefix, block = ids.split((PREFIX_LENGTH, WIDTH), dim=1)
    # With cache, mask and positions as `generate` prepares them for this family.
    model, prefix, _, kwargs = prepared(target, prefix, WIDTH + 1)
    return [_logits_behind(model, prefix, block, width, copy.deepcopy(kwargs)) for width in (WIDTH, 1)]


def _logits_behind(
    model: PreTrainedModel, prefix: torch.Tensor, block: torch.Tensor, width: int, kwargs: dict[str, Any]
) -> torch.Tensor:
    """Logits `[W, V]` of a block behind a prefix, of which each forward takes so many positions."""
    logits: list[torch.Tensor] = []
    for ids in (prefix, *block.split(width, dim=1)):
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=ids.shape[1], is_first_iteration=not logits, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = ids.shape[1]
        outputs = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(
            outputs, kwargs, is_encoder_decoder=False, num_new_tokens=width
        )
        logits.append(outputs.logits[0, -width:].double())
    return torch.cat(logits[1:])


def _excuse(target: PreTrainedModel) -> str | None:
    """The reason why a large difference may be rounding; None where it is a fault."""
    text = target.config.get_text_config(decoder=True)
    if any("experts" in name and isinstance(value, int) and value > 1 for name, value in text.to_dict().items()):
        return "Rounding may choose other experts."
    kinds = {type(part).__module__ for part in (*target.modules(), *target.parameters())}
    if getattr(target.config, "quantization_config", None) is not None or any("quant" in kind for kind in kinds):
        return "Quantised activations depend on what they are quantised with."
    if (dtype := rounded_to(target)) not in (torch.float32, torch.float64):
        return f"{dtype} rounds coarsely."
    return None

"""Work around faults of vLLM on a CPU that cost acceptance, change texts or end a start.

`tests/serving/vllm_faults.md` describes each fault for vLLM, with a reproduction. `fix_context_norms` and
`fix_expansion` first try whether this vLLM has the fault, and change nothing if it does not.

Shapes: L layers, D width of a head, C context positions, B requests, N proposals of all requests.
"""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler

logger = init_logger("vllm.hf_domino")
NO_KEYS = torch._C.DispatchKeySet.from_raw_repr(0)  # none of the dispatch keys that a trace adds


def fix_context_norms(model: Any) -> None:
    """Normalise each layer's context keys with its own norm, if vLLM's kernel uses the first layer's norm for all.

    On a CPU, `rms_norm` does not support weights `[L, D]` with one row per layer.
    """
    if not hasattr(model, "_k_norm_weights") or not hasattr(model, "_normalize_context_k"):
        return  # another version of vLLM, in which other drafters must still load
    weights = model._k_norm_weights  # [L, D]
    ones = torch.ones_like(weights)[:, None, None]
    normed = model._normalize_context_k(ones)[:, 0, 0]
    if not torch.allclose(normed.float(), weights.float(), rtol=1e-2, atol=1e-3):
        model._normalize_context_k = MethodType(_normalize_by_layer, model)
        logger.info_once(
            "hf_domino works around a fault of vLLM: context keys of all layers are normed as in the first."
        )


def _normalize_by_layer(model: Any, all_k: torch.Tensor) -> torch.Tensor:
    normed = torch.empty_like(all_k)  # [L, C, heads, D]
    for out, keys, weight in zip(normed, all_k, model._k_norm_weights, strict=True):
        ops.rms_norm(out, keys, weight, model._rms_norm_eps)
    return normed


def fix_expansion(device: torch.device) -> None:
    """Make the temperature, top-k and top-p of a request reach its proposals.

    On a CPU, the expansion to one value per proposal writes to a copy, unless the values are int64. The verification of
    sampled drafts, from any drafter, then reads uninitialised memory, and texts do not follow the target's
    distribution.
    """
    if device.type != "cpu" or not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        return
    values = torch.tensor([0.25, 0.75])
    ends = torch.tensor([1, 3], dtype=torch.int32)
    if rejection_sampler.expand_batch_to_tokens(values, ends, 3).tolist() != [0.25, 0.75, 0.75]:
        rejection_sampler.expand_batch_to_tokens = _expand
        logger.info_once("hf_domino works around a fault of vLLM: sampled drafts on a CPU lose the temperature.")


def _expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Expand the values `[B]` of requests to their proposals `[N]`; the signature is vLLM's."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)


def fix_release() -> None:
    """Let Python's garbage collector free a matrix of oneDNN while vLLM compiles a model.

    On a CPU, `__del__` of the matrix reads a number from a tensor. In the middle of a trace, this calls itself without
    end and ends the server. A drafter leaves such a matrix, because vLLM replaces its lm_head by the target's.
    """
    if not hasattr(ops, "CPUDNNLGEMMHandler"):
        return  # another version of vLLM
    release = ops.CPUDNNLGEMMHandler.__del__
    if hasattr(release, "__wrapped__"):
        return  # fixed when an earlier drafter was loaded

    @wraps(release)
    def outside_a_trace(self: Any) -> None:
        with torch._C._ForceDispatchKeyGuard(NO_KEYS, NO_KEYS):
            release(self)

    ops.CPUDNNLGEMMHandler.__del__ = outside_a_trace

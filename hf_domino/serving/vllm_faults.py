"""Faults of vLLM on a CPU that cost acceptance or change texts, mended where a trial finds them.

`docs/upstream.md` describes each for vLLM, with a reproduction. Nothing is touched where there is no fault.

Shapes: L layers, D width of a head, C context positions, B requests, N proposals of all requests.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.v1.sample import rejection_sampler

logger = init_logger("vllm.hf_domino")


def mend_context_norms(model: Any) -> None:
    """Give each layer's context keys its own norm, where vLLM's kernel gives all of them the first layer's.

    On a CPU `rms_norm` does not know weights `[L, D]` of one row per layer. Whether it does is tried, so that nothing
    is touched where it does.
    """
    if not hasattr(model, "_k_norm_weights") or not hasattr(model, "_normalize_context_k"):
        return  # another version; drafters that are not ours must load there, too
    weights = model._k_norm_weights  # [L, D]
    ones = weights.new_ones(len(weights), 1, 1, weights.shape[1])
    normed = model._normalize_context_k(ones)[:, 0, 0]
    if not torch.allclose(normed.float(), weights.float(), rtol=1e-2, atol=1e-3):
        model._normalize_context_k = MethodType(_normalize_by_layer, model)
        logger.info_once("hf_domino: this vLLM norms all layers' context keys by the first layer's weight; mended.")


def _normalize_by_layer(model: Any, all_k: torch.Tensor) -> torch.Tensor:
    normed = torch.empty_like(all_k)  # [L, C, heads, D]
    for out, keys, weight in zip(normed, all_k, model._k_norm_weights, strict=True):
        ops.rms_norm(out, keys, weight, model._rms_norm_eps)
    return normed


def mend_expansion(device: torch.device) -> None:
    """Let temperature, top-k and top-p of a request reach its proposals.

    On a CPU the expansion to one value per proposal writes to a copy unless it is of int64: verification of sampled
    drafts then reads memory that nobody wrote, whatever the drafter, and texts are not of the target's distribution.
    """
    if device.type != "cpu" or not hasattr(rejection_sampler, "expand_batch_to_tokens"):
        return
    values, ends = torch.tensor([0.25, 0.75]), torch.tensor([1, 3], dtype=torch.int32)
    if rejection_sampler.expand_batch_to_tokens(values, ends, 3).tolist() != [0.25, 0.75, 0.75]:
        rejection_sampler.expand_batch_to_tokens = _expand
        logger.info_once("hf_domino: this vLLM loses the temperature of sampled drafts on a CPU; mended.")


def _expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """One value for each proposal `[N]` of each request's `[B]`; the signature is vLLM's."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

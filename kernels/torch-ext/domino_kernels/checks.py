"""Validates the inputs of the operations, in one place so that both implementations reject the same inputs.

Shapes: B rows, L branches per row, S branches per row at the previous depth, V vocabulary, M candidates, R low rank, H
width of embeddings, G width of the state.
"""

from __future__ import annotations

import math

import torch

from .dispatch import FLOATS


def check_choice(
    base_logits: torch.Tensor,
    low_rank: torch.Tensor,
    up_weight: torch.Tensor,
    candidate_ids: torch.Tensor | None,
    noise: torch.Tensor | None,
    temperature: float | None,
) -> None:
    """Validate the inputs of `correct_and_choose`.

    Raises:
        ValueError: If an input is invalid. The message names it, its value, what is allowed and how to fix it.
    """
    _check_floats(base_logits=base_logits, up_weight=up_weight)
    _check_shape("up_weight", up_weight, ("V", None), ("R", None))
    vocab_size, rank = up_weight.shape
    pool_size = vocab_size if candidate_ids is None or candidate_ids.dim() != 2 else candidate_ids.shape[1]
    _check_shape("base_logits", base_logits, ("B", None), ("V" if candidate_ids is None else "M", pool_size))
    num_rows = base_logits.shape[0]
    _check_shape("low_rank", low_rank, ("B", num_rows), ("R", rank))
    _check_like("low_rank", low_rank, "up_weight", up_weight)
    others = {"base_logits": base_logits}
    if candidate_ids is not None:
        _check_shape("candidate_ids", candidate_ids, ("B", num_rows), ("M", pool_size))
        _check_dtype("candidate_ids", candidate_ids, torch.int64)
        others["candidate_ids"] = candidate_ids
    if noise is not None:
        _check_shape("noise", noise, ("B", num_rows), ("V", vocab_size))
        _check_dtype("noise", noise, torch.float32)
        others["noise"] = noise
    if temperature is not None:
        _check_temperature(temperature, noise)
    _check_devices("up_weight", up_weight, others)


def check_gru(
    inputs: torch.Tensor,
    state: torch.Tensor,
    weight_ih: torch.Tensor,
    weight_hh: torch.Tensor,
    embedding: torch.Tensor | None,
) -> None:
    """Validate the inputs of `gru_step`.

    Raises:
        ValueError: If an input is invalid. The message names it, its value, what is allowed and how to fix it.
    """
    _check_floats(state=state)
    _check_shape("state", state, ("B", None), ("G", None))
    num_rows, num_units = state.shape
    _check_shape("weight_hh", weight_hh, ("3G", 3 * num_units), ("G", num_units))
    _check_shape("weight_ih", weight_ih, ("3G", 3 * num_units), ("H", None))
    input_size = weight_ih.shape[1]
    others = {"weight_ih": weight_ih, "weight_hh": weight_hh}
    if embedding is None:
        _check_shape("inputs", inputs, ("B", num_rows), ("H", input_size))
        others["inputs"] = inputs
    else:
        _check_shape("inputs", inputs, ("B", num_rows))
        _check_dtype("inputs", inputs, torch.int64)
        _check_shape("embedding", embedding, ("V", None), ("H", input_size))
        others["embedding"] = embedding
        _check_devices("state", state, {"inputs": inputs})
    for name, tensor in others.items():
        _check_like(name, tensor, "state", state)
    _check_devices("state", state, others)


def check_advance(products: torch.Tensor, state: torch.Tensor, owners: torch.Tensor, weight_hh: torch.Tensor) -> None:
    """Validate the inputs of `advance_branches`.

    Raises:
        ValueError: If an input is invalid. The message names it, its value, what is allowed and how to fix it.
    """
    _check_floats(state=state)
    _check_shape("state", state, ("B", None), ("S", None), ("G", None))
    num_rows, _, num_units = state.shape
    _check_shape("owners", owners, ("B", num_rows), ("L", None))
    _check_dtype("owners", owners, torch.int64)
    _check_shape("products", products, ("B", num_rows), ("L", owners.shape[1]), ("3G", 3 * num_units))
    _check_shape("weight_hh", weight_hh, ("3G", 3 * num_units), ("G", num_units))
    _check_like("products", products, "state", state)
    _check_like("weight_hh", weight_hh, "state", state)
    _check_devices("state", state, {"owners": owners})


def check_corrections(
    base_logits: torch.Tensor,
    block_part: torch.Tensor,
    state_part: torch.Tensor,
    up_weight: torch.Tensor,
    candidate_ids: torch.Tensor,
) -> None:
    """Validate the inputs of `correct_branches`.

    Raises:
        ValueError: If an input is invalid. The message names it, its value, what is allowed and how to fix it.
    """
    _check_floats(base_logits=base_logits, up_weight=up_weight)
    _check_shape("up_weight", up_weight, ("V", None), ("R", None))
    _check_shape("base_logits", base_logits, ("B", None), ("M", None))
    (num_rows, pool_size), rank = base_logits.shape, up_weight.shape[1]
    _check_shape("block_part", block_part, ("B", num_rows), ("R", rank))
    _check_shape("state_part", state_part, ("B", num_rows), ("L", None), ("R", rank))
    _check_shape("candidate_ids", candidate_ids, ("B", num_rows), ("M", pool_size))
    _check_dtype("candidate_ids", candidate_ids, torch.int64)
    _check_like("block_part", block_part, "up_weight", up_weight)
    _check_like("state_part", state_part, "up_weight", up_weight)
    _check_devices("up_weight", up_weight, {"base_logits": base_logits, "candidate_ids": candidate_ids})


def _check_temperature(temperature: float, noise: torch.Tensor | None) -> None:
    if noise is None:
        raise ValueError(
            f"temperature must be None without noise, got {temperature}. "
            "Give noise to sample; leave temperature out for the most likely token."
        )
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature must be a finite number above 0, got {temperature}. "
            "Leave out noise and temperature for the most likely token."
        )


def _check_floats(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            allowed = ", ".join(str(dtype) for dtype in FLOATS)
            raise ValueError(f"{name} must have one of the dtypes {allowed}, got {tensor.dtype}. Cast it first.")


def _check_shape(name: str, tensor: torch.Tensor, *dimensions: tuple[str, int | None]) -> None:
    fits = tensor.dim() == len(dimensions) and all(
        actual > 0 and size in (None, actual) for actual, (_, size) in zip(tensor.shape, dimensions, strict=True)
    )
    if not fits:
        wanted = "[" + ", ".join(word if size is None else f"{word} = {size}" for word, size in dimensions) + "]"
        raise ValueError(
            f"{name} must have the shape {wanted}, got {list(tensor.shape)}. Reshape it, or check the others."
        )
    if tensor.dim() > 1 and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}: .contiguous()."
        )


def _check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}. Convert it with .to({dtype}).")


def _check_like(name: str, tensor: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    if tensor.dtype != like.dtype:
        raise ValueError(
            f"{name} must have the dtype of {like_name}, {like.dtype}, got {tensor.dtype}. Cast one of the two."
        )
    _check_devices(like_name, like, {name: tensor})


def _check_devices(like_name: str, like: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.device != like.device:
            raise ValueError(
                f"{name} must be on the device of {like_name}, {like.device}, got {tensor.device}. Move one of the two."
            )

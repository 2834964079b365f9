"""Read the names of dtypes as users write them, and choose a dtype that suits a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_domino._common.errors import invalid_argument

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")  # dtypes to compute in and to store weights in
SYNONYMS = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_name(text: str) -> str:
    """Return torch's own name for a dtype, such as `bfloat16` for `bf16`; any other text is returned unchanged."""
    name = text.removeprefix("torch.")
    return SYNONYMS.get(name, name)


def dtype_of(written: torch.dtype | str, field: str = "dtype", remedy: str = "Choose one of them.") -> torch.dtype:
    """Return the torch dtype of a name; a dtype is returned unchanged."""
    import torch

    name = dtype_name(str(written))
    if name not in DTYPES:
        raise invalid_argument(field, f"one of {', '.join(DTYPES)}", written, remedy)
    return getattr(torch, name)


def supported_dtype(device: str, saved: torch.dtype) -> torch.dtype:
    """Choose the dtype to load a checkpoint in: its own, or fp16 if that is bf16 and the GPU (a T4, say) lacks bf16."""
    import torch

    if device.startswith("cuda") and saved == torch.bfloat16:
        with torch.cuda.device(device):
            if not torch.cuda.is_bf16_supported(including_emulation=False):
                return torch.float16
    return saved


def fast_dtype(device: str) -> torch.dtype:
    """Choose the dtype to compute in: bf16 on a GPU and on CPUs that have instructions for it, else fp32."""
    import torch  # imported late, because commands that only read names do not need it

    if device != "cpu":
        return torch.bfloat16
    supported: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # the oldest torch lacks it
    if any(supported.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")):
        return torch.bfloat16
    return torch.float32

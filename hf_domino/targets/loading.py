"""Load a target by its name or configuration, with whichever of Transformers' auto classes supports its type."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from hf_domino._common.dtypes import fast_dtype
from hf_domino._common.errors import invalid_argument

ADAPTER_CONFIG = "adapter_config.json"


def _by_first(method: str, source: Any, **kwargs: Any) -> PreTrainedModel:
    """Create a model with the first auto class that supports the source."""
    for auto_class in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        try:
            return getattr(auto_class, method)(source, **kwargs)
        except ValueError as error:
            unknown = str(error).partition("\n")[0]  # without the list of all supported classes
            if not unknown.startswith("Unrecognized configuration class"):
                raise
    raise invalid_argument("the target", "a language model", unknown, "Name a model that AutoModelForCausalLM loads.")


class AutoTarget:
    """Stand-in for an auto class that loads any target, whether it is a causal or a multimodal language model."""

    from_pretrained = partial(_by_first, "from_pretrained")
    from_config = partial(_by_first, "from_config")


def load_config(name: str, **options: Any) -> PreTrainedConfig:
    """Load the configuration of a target; for an adapter, which has none, that of the model under it.

    Args:
        name (`str`): The folder or Hub name.
        options: Other arguments of `from_pretrained`.
    """
    try:
        return AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError):
        offline = {"local_files_only": options.get("local_files_only", False)}
        path = cached_file(name, ADAPTER_CONFIG, _raise_exceptions_for_missing_entries=False, **offline)
        if path is None:
            raise
    base = json.loads(Path(path).read_text(encoding="utf-8"))["base_model_name_or_path"]
    return AutoConfig.from_pretrained(base, **options)


def trusting(trust_remote_code: bool) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` runs code that comes with a model, if it is trusted.

    Without the argument, Transformers asks in a terminal.
    """
    return {"trust_remote_code": True} if trust_remote_code else {}


def load_target(name: str, device: str, dtype: str = "auto", **options: Any) -> PreTrainedModel:
    """Load a target from a folder or the Hub.

    Args:
        name (`str`): The folder or Hub name.
        device (`str`): Type of the device on which the target will run.
        dtype (`str`, *optional*, defaults to `"auto"`): dtype of the weights. With `"auto"`, it is that of the files,
            or float32 on a CPU without instructions for bfloat16, which is many times as fast there.
        options: Other arguments of `from_pretrained`.
    """
    if dtype == "auto" and fast_dtype(device) == torch.float32:
        dtype = "float32"
    return AutoTarget.from_pretrained(name, dtype=dtype, **options)


def place_target(target: PreTrainedModel, device: torch.device) -> None:
    """Move a target to a device, unless a `device_map`, offloading or sharding has already placed its parts."""
    weights = list(target.parameters())
    is_placed = len({weight.device for weight in weights}) > 1 or any(
        weight.is_meta or hasattr(weight, "device_mesh") for weight in weights
    )
    is_hooked = any(hasattr(module, "_hf_hook") for module in target.modules())
    if not (is_placed or is_hooked) and target.device != device:
        target.to(device)

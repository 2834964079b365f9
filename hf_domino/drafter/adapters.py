"""PEFT's adapters on a drafter: made, loaded into the drafter they belong to, and merged where that is needed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.utils import cached_file, is_peft_available
from transformers.utils.peft_utils import find_adapter_config_file

from hf_domino._common.refusal import refusal
from hf_domino.formats.loading import check_finite, shown
from hf_domino.formats.source import check_source, read_object
from hf_domino.target.identity import TargetIdentity

_FIELD = "base_model_name_or_path in adapter_config.json"
# What LoRA adapts of a drafter: every matrix. PEFT adapts modules by the ends of their names, and parameters of a GRU.
LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"),
    *("kernel_projection", "embed_proj.0", "embed_proj.2"),
)
GRU_WEIGHTS = ("prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0")
TARGET_FILE = "target.json"
OLDEST_PEFT = "0.17"  # it adapts parameters too


def add_lora(drafter: Any, rank: int, alpha: int) -> Any:
    """Put LoRA on every matrix of a drafter that has a name, and freeze all else; only LoRA is saved."""
    from peft import LoraConfig, get_peft_model

    drafter.config.kind.refuse_what_it_lacks("lora_rank")
    if not drafter.name_or_path:
        remedy = "Save it with save_pretrained, and load it again."
        raise refusal("the drafter of a LoRA training", "one loaded from a folder or the Hub", "a new one", remedy)
    has_head = drafter.has_correction_head
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[name for name in LAYERS if has_head or not name.startswith("embed_proj")],
        target_parameters=list(GRU_WEIGHTS) if has_head else None,
    )
    wrapped = get_peft_model(drafter, config)
    wrapped.__dict__["create_or_update_model_card"] = lambda *_: None  # the trainer writes a drafter's card
    return wrapped


def load_adapter(drafter: Any, name: str, download: Mapping[str, Any]) -> Any:
    """Put a saved adapter into its drafter; one of the correction head, which is read weight by weight, is merged."""
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights

    field, again = f"the adapter {name}", "Save it again, or download it again."
    try:
        stored = {_own_name(key): tensor for key, tensor in load_peft_weights(name, device="cpu", **download).items()}
        of_head = any(key.split(".")[0] in drafter.config.kind.head_modules() for key in stored)
        # Nothing is made in the sizes that its configuration tells.
        if of_head:
            wrapped = PeftModel.from_pretrained(drafter, name, low_cpu_mem_usage=True, **download)
        else:
            drafter.load_adapter(name, adapter_kwargs=dict(download), low_cpu_mem_usage=True)
            wrapped = drafter
    except Exception as error:  # PEFT's own, of any class, name neither file nor field
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise refusal(field, "one that PEFT can put into its drafter", reason, again) from error
    check_finite(stored, f"{field}'s")
    described = {_own_name(key) for key in get_peft_model_state_dict(wrapped)}
    if wrong := sorted(described - stored.keys()) or sorted(stored.keys() - described):
        word = "without" if wrong[0] in described else "with"
        raise refusal(field, "of the tensors that its configuration describes", f"a file {word} {shown(wrong)}", again)
    # There is none where PEFT alone saved it.
    file = cached_file(name, TARGET_FILE, _raise_exceptions_for_missing_entries=False, **download)
    if file and (target := TargetIdentity.from_dict(read_object(Path(file)))):
        target.record_in(drafter.config)
    return wrapped.merge_and_unload() if of_head else drafter


def save_target(drafter: Any, folder: str | os.PathLike) -> None:
    """Write the target that an adapter was trained for beside it: its drafter names another one."""
    if target := TargetIdentity.recorded_in(drafter.config):
        Path(folder, TARGET_FILE).write_text(json.dumps(target.to_dict(), indent=2) + "\n", encoding="utf-8")


def _own_name(key: str) -> str:
    return key.removeprefix("base_model.model.")


def base_of(name: Any, download: Mapping[str, Any]) -> str | None:
    """Find the drafter that a saved adapter was made for; None of a whole model, or of no adapter."""
    is_name = isinstance(name, (str, os.PathLike))
    if not is_name or not is_peft_available() or (Path(name) / "config.json").is_file():
        return None
    file = find_adapter_config_file(os.fspath(name), **download)
    if file is None:
        return None
    base = read_object(Path(file)).get("base_model_name_or_path")
    is_itself = isinstance(base, str) and Path(base).is_dir() and Path(base).samefile(Path(file).parent)
    if not base or not isinstance(base, str) or is_itself or base == os.fspath(name):
        remedy = f"Load the drafter, and then drafter.load_adapter({os.fspath(name)!r})."
        raise refusal(_FIELD, "the drafter's folder or Hub name", base, remedy)
    check_source(base, _FIELD, **base_download(download))
    return base


def base_download(download: Mapping[str, Any]) -> dict[str, Any]:
    """Of `from_pretrained`'s arguments for the Hub, those that are good for the drafter of an adapter, too."""
    return {key: download[key] for key in ("cache_dir", "force_download", "proxies", "token") if key in download}

"""Register our drafter in each process of vLLM, which finds this module by the `vllm.general_plugins` entry point."""

from __future__ import annotations

import importlib.util
import logging

ARCHITECTURE = "DFlashDraftModel"
MODEL = "hf_domino.serving.vllm_model:ServedDrafter"
BASE = "vllm.model_executor.models.qwen3_dflash"


def register() -> None:
    """Replace vLLM's model of DFlash drafters with ours, by name, so that it is only imported to serve a drafter."""
    # An error here would stop every vLLM server in this environment, so it becomes a warning, and vLLM's own model
    # stays.
    try:
        from vllm import ModelRegistry

        if importlib.util.find_spec(BASE) is None:
            raise ModuleNotFoundError(f"this vLLM has no {BASE}")
        ModelRegistry.register_model(ARCHITECTURE, MODEL)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        logging.getLogger("vllm.hf_domino").warning("hf_domino serves no Domino drafters here. %s", reason)

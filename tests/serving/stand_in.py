"""Modules in the place of vLLM's, as far as our model of a drafter leans on them: rows, weights and logits."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

PREFIX = "vllm."


class Backbone:
    """Gives draft hidden states that were put there, and context keys as vLLM's kernel on a CPU."""

    decoder_layer_cls = "of DFlash"

    def __init__(self, target, k_norms):
        self.embed_tokens = target.get_input_embeddings()
        self.hidden: torch.Tensor | None = None  # [N, H]
        self._k_norm_weights, self._rms_norm_eps = k_norms, 1e-6

    def _normalize_context_k(self, all_k):
        out = torch.empty_like(all_k)
        sys.modules["vllm._custom_ops"].rms_norm(out, all_k, self._k_norm_weights, self._rms_norm_eps)
        return out


class DFlashQwen3ForCausalLM(torch.nn.Module):
    """The base class: a target's lm_head, and the weights that it was given."""

    model_cls = Backbone

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.lm_head = vllm_config.target.lm_head
        self.model = self.model_cls(vllm_config.target, vllm_config.k_norms)
        self.loaded: dict[str, torch.Tensor] = {}

    def forward(self, input_ids, positions, inputs_embeds=None):
        """The rows that a test put there."""
        return self.model.hidden

    def compute_logits(self, hidden_states):
        """Base logits."""
        return self.lm_head(hidden_states)

    def load_weights(self, weights):
        """Keep them."""
        self.loaded = dict(weights)


def rms_norm(out, rows, weight, eps):
    """The kernel of a CPU: of weights `[L, D]` the first row alone."""
    normed = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)
    out.copy_(normed * weight.reshape(-1, rows.shape[-1])[0])


def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """The fault of a CPU: nothing is written."""
    return torch.full((num_tokens,), torch.nan).to(x)


def install(monkeypatch, version="0.32.0", **modules: Any) -> None:
    """Put the modules where imports look."""
    logger = logging.getLogger("vllm.hf_domino")
    logger.warning_once, logger.info_once = logger.warning, logger.info  # type: ignore[attr-defined]
    contents = {
        "": {"__version__": version, "__path__": []} | modules,
        "_custom_ops": {"rms_norm": rms_norm},
        "config": {"VllmConfig": object},
        "logger": {"init_logger": lambda name: logger},
        "v1": {"__path__": []},
        "v1.sample": {"__path__": []},
        "v1.sample.rejection_sampler": {"expand_batch_to_tokens": expand_batch_to_tokens},
        "model_executor": {"__path__": []},
        "model_executor.models": {"__path__": []},
        "model_executor.models.qwen3_dflash": {"DFlashQwen3ForCausalLM": DFlashQwen3ForCausalLM},
        "model_executor.models.qwen3_dflash2": {"DFlash2Qwen3DecoderLayer": "of DFlash 2"},
    }
    for name, values in contents.items():
        module = ModuleType((PREFIX + name).removesuffix("."))
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]  # type: ignore[attr-defined]
    sys.modules["vllm.v1.sample"].rejection_sampler = sys.modules["vllm.v1.sample.rejection_sampler"]  # type: ignore
    for name in ("vllm_model", "vllm_faults"):
        monkeypatch.delitem(sys.modules, f"hf_domino.serving.{name}", raising=False)


def server(target, stored, k_norms=None, is_v2=False, **settings) -> SimpleNamespace:
    """A server's configuration, as far as it is read."""
    defaults = {"num_speculative_tokens": 5, "draft_sample_method": "greedy"}
    wrapped = SimpleNamespace(to_dict=lambda: {"model": stored, "method": "dflash"})
    speculative = SimpleNamespace(**(defaults | settings), draft_model_config=SimpleNamespace(hf_config=wrapped))
    return SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(hf_text_config=target.config),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        use_v2_model_runner=is_v2,
        target=target,
        k_norms=torch.ones(2, 8) if k_norms is None else k_norms,
    )

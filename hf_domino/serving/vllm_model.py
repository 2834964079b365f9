"""Extend vLLM's model of a DFlash drafter to Domino, `shift_label` and convolutions, if the drafter needs them.

Shapes: B requests, P proposals, N token ids (B (1 + P), or more if they are padded), H hidden size, V vocabulary, L
layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import vllm
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.formats.dflash_config import DFLASH_CONFIG
from hf_domino.formats.draft_vocabulary import T2D, drafted_ids, t2d_of
from hf_domino.formats.loading import check_tensors
from hf_domino.serving.head import BlockHead, anchors_of
from hf_domino.serving.settings import check_settings, check_target, served_config, version_notice
from hf_domino.serving.vllm_faults import fix_context_norms, fix_expansion, fix_release, logger

V2_NOTICE = (
    "hf_domino's plugin was run with vLLM's V1 runner. This is the V2 runner, whose code was read and not run: compare "
    "the mean acceptance length that vLLM logs with that of `hf-domino bench`, or set VLLM_USE_V2_MODEL_RUNNER=0."
)


class ServedDrafter(DFlashQwen3ForCausalLM):
    """vLLM's DFlash drafter, extended to Domino, `shift_label` or convolutions as the drafter's configuration says."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        drafter_config = _served(vllm_config)
        if drafter_config is not None and drafter_config.conv_kernel_size is not None:
            from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3DecoderLayer

            # For these layers, row i of the batch is position i % (1 + P) of its block, so convolutions stay inside it.
            layers = {"decoder_layer_cls": DFlash2Qwen3DecoderLayer}
            self.model_cls = type("ConvolvedModel", (DFlashQwen3ForCausalLM.model_cls,), layers)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.drafter_config = drafter_config
        self.num_proposals = vllm_config.speculative_config.num_speculative_tokens
        self.head = None
        if drafter_config is not None and drafter_config.projector_type == "domino":
            self.head = BlockHead(drafter_config)
        self.left_out: torch.Tensor | None = None  # [V], true for tokens that are not drafted
        self._rows: torch.Tensor  # token ids [N] of the last forward

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute draft hidden states `[N, H]`, each at the position of the token that it predicts."""
        hidden = super().forward(input_ids, positions, inputs_embeds)
        self._rows = input_ids
        if self.drafter_config is not None and self.drafter_config.shift_label:
            # Each state predicts the next token, so it moves to that token's position, where vLLM expects it.
            return hidden.roll(1, dims=0)
        return hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Compute the logits, corrected along each block; their argmax are the proposals."""
        logits = super().compute_logits(hidden_states)
        if self.left_out is not None:
            logits = logits.masked_fill(self.left_out, -torch.inf)
        if self.head is None:
            return logits
        anchors = anchors_of(self._rows, len(hidden_states), self.num_proposals)
        blocks = (part.unflatten(0, (-1, self.num_proposals)) for part in (logits, hidden_states))  # [B, P, ...]
        return self.head(*blocks, anchors, self.model.embed_tokens).flatten(end_dim=1)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors of a folder: the head's here, and the others with vLLM's own code."""
        if self.drafter_config is not None:
            tensors = {DFLASH_CONFIG.rename(name): tensor for name, tensor in weights}
            weights = self._load_head(self.drafter_config, tensors).items()
        super().load_weights(weights)
        fix_context_norms(self.model)
        fix_expansion(self.lm_head.weight.device)
        fix_release()

    def _load_head(self, drafter_config: DominoConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Load the tensors that vLLM's model does not have, and return the others."""
        check_tensors(drafter_config, DFLASH_CONFIG, tensors)
        t2d = tensors.pop(T2D, None)
        if t2d is not None:
            ids = drafted_ids(t2d, drafter_config.vocab_size)
            self.left_out = ~t2d_of(ids, drafter_config.vocab_size).to(self.lm_head.weight.device)
        if self.head is not None:
            own = [name for name in tensors if name.partition(".")[0] in drafter_config.head_modules()]
            self.head.load_state_dict({name: tensors.pop(name) for name in own})
        return tensors


def _served(vllm_config: VllmConfig) -> DominoConfig | None:
    """Read the configuration of a drafter that needs the plugin, and check that the server and the target fit it."""
    speculative = vllm_config.speculative_config
    stored = speculative.draft_model_config.hf_config.to_dict()
    drafter_config = served_config(stored.get("model") or stored)  # vLLM wraps the folder's configuration
    if drafter_config is None:
        return None
    check_settings(drafter_config, vars(speculative) | vars(vllm_config.parallel_config))
    check_target(drafter_config, vllm_config.model_config.hf_text_config)
    if notice := version_notice(vllm.__version__):
        logger.warning_once(notice)
    if vllm_config.use_v2_model_runner:
        logger.warning_once(V2_NOTICE)
    return drafter_config

"""What tests build tiny models from. A module of its own: every folder of tests may have a conftest."""

from __future__ import annotations

import dataclasses

import torch
from transformers import PreTrainedModel

SEED = 0
VOCAB_SIZE = 64
EOS, PAD, MASK = 1, 2, 3

TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # wide enough that greedy text of a random model varies
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
}


def build_drafter(target: PreTrainedModel, **overrides) -> PreTrainedModel:
    """Build a random fp32 drafter for a tiny target.

    Args:
        target (`PreTrainedModel`): The target the drafter must fit.
        overrides: Fields of `DominoConfig` to set in place of the tiny defaults.
    """
    from hf_domino import DominoConfig, DominoDraftModel
    from hf_domino.configuration.registry import METHODS, all_fields
    from hf_domino.methods.backbone import ZeroLinear

    fields = {
        "num_hidden_layers": 2,
        "block_size": 6,
        "mask_token_id": MASK,
        "emb_dim": 16,
        "gru_hidden_dim": 16,
        "pure_draft_prefix_len": 0,
        "draft_pool_size": 16,
        "draft_length": "full",
        "initializer_range": 0.2,
    } | overrides
    method = METHODS[fields.get("projector_type", "domino")].config_class
    own = {field.name for field in dataclasses.fields(method)}.difference(method.unread)
    fields = {name: value for name, value in fields.items() if name in own or name not in all_fields()} | method.fixed
    torch.manual_seed(SEED + 1)
    drafter = DominoDraftModel(DominoConfig.for_target(target.config, **fields)).eval()
    for name, module in drafter.named_modules():
        if isinstance(module, ZeroLinear):
            torch.nn.init.normal_(
                module.weight, std=0.05 if "conv" in name else 0.2
            )  # fresh corrections are zero: nothing to test
    return drafter


def left_padded(prompts: list[torch.Tensor], pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of prompts as Transformers users write it: ids and attention mask, `[batch, longest]`.

    Args:
        prompts (`list[torch.Tensor]`): Token ids `[length]` of each row.
        pad (`int`, *optional*, defaults to 0): Token in front of the shorter ones.
    """
    longest = max(len(prompt) for prompt in prompts)
    rows = [torch.nn.functional.pad(prompt, (longest - len(prompt), 0), value=pad) for prompt in prompts]
    masks = [torch.arange(longest) >= longest - len(prompt) for prompt in prompts]
    return torch.stack(rows), torch.stack(masks).long()

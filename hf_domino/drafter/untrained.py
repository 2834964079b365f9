"""A drafter without weights, made where it is needed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.drafter.modeling import DominoDraftModel


def recycling(target: PreTrainedModel, **fields: Any) -> DominoDraftModel:
    """Make a drafter that needs no training: it proposes what the target has given before (arXiv 2408.08696).

    Of each token it keeps the eight likeliest successors, as the target gave them last, from one call to the next. So
    keep the drafter, too.

    Args:
        target (`PreTrainedModel`): The target it is for, on its device.
        fields: Fields of [`DominoConfig`], such as `draft_tree_size` (defaults to 32 nodes) or `block_size` (defaults
            to paths of 8).

    Raises:
        ValueError: If the target is no model, or a field is unknown or out of its range.

    Example:
    ```python
    >>> import torch
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> import hf_domino
    >>> target = Qwen3ForCausalLM(Qwen3Config(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=16,
    ... ))
    >>> drafter, ids = hf_domino.recycling(target), torch.tensor([[5, 9, 33]])
    >>> options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    >>> torch.equal(target.generate(ids, assistant_model=drafter, **options), target.generate(ids, **options))
    True

    ```
    """
    embeddings = getattr(target, "get_input_embeddings", lambda: None)()
    if embeddings is None:
        remedy = "Pass the model itself, as from_pretrained returned it."
        raise refusal("target", "a causal language model", type(target).__name__, remedy)
    device = embeddings.weight.device
    config = DominoConfig.for_target(target.config, projector_type="recycling", **fields)
    with torch.inference_mode(False):  # the table is written to later, in any mode
        return DominoDraftModel(config).to("cpu" if device.type == "meta" else device)

"""Token recycling: no weights, only a table of each token's most likely successors (arXiv 2408.08696).

Other methods discard the target's predictions once a position is verified, accepted or not. Token recycling keeps the M
most likely tokens: they become the successors of the token at that position, and later rounds propose trees built from
the table.

Shapes: N positions of a verification forward, of all sequences, M successors, V vocabulary, B sequences, L branches.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.methods.modeling import DominoDraftModel

NUM_SUCCESSORS = 8  # per token (arXiv 2408.08696)


@strict
class RecyclingConfig(DominoConfig):
    """Configuration of token recycling; its fields are those of [`DominoConfig`]."""

    projector_type: str = "recycling"
    num_hidden_layers: int = 1

    title = "token recycling"
    learns_while_drafting = True
    smaller_trees = (4, 8, 16)
    defaults = {"block_size": 8, "num_hidden_layers": 1, "draft_tree_size": 32}
    fixed = {"num_hidden_layers": 1, "shift_label": True, "pure_draft_prefix_len": 0} | dict.fromkeys(
        ("draft_vocab_size", "draft_window_size")
    )
    unread = ("intermediate_size", "mask_token_id")
    lacks = dict.fromkeys(
        ("training", "export", "save_pretrained", "check_fit", "explain_round"),
        "It has no weights, and fills its table while hf_domino's own loop generates.",
    ) | {"cache_implementation='static'": "Its trees are no rounds of fixed shape yet; leave it out."}

    @classmethod
    def choose_layers(cls, num_target_layers: int, num_captured: int | None = None) -> list[int]:
        """Choose the last layer: token recycling reads none, and the last one costs least to capture."""
        return [num_target_layers - 1]


class RecyclingModel(DominoDraftModel):
    """Token recycling: a table of each token's successors and their scores."""

    config_class = RecyclingConfig
    config: RecyclingConfig

    def build(self) -> None:
        # Until a token is seen, its successors have the score -inf.
        size = self.config.vocab_size, min(NUM_SUCCESSORS, self.config.vocab_size)
        self.successors = nn.Parameter(torch.arange(size[1]).repeat(size[0], 1), requires_grad=False)
        self.scores = nn.Parameter(torch.full(size, -torch.inf), requires_grad=False)

    def learn(self, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        # If a token occurs more than once, the successors of its first occurrence count.
        table = self.successors
        scores = self.scores
        best = logits.topk(table.shape[1], dim=1)
        places = torch.arange(len(tokens), device=tokens.device)
        # All occurrences of a token write the same values, because the order of the writes can be undefined.
        first = places.new_full((len(table),), len(tokens)).scatter_reduce(0, tokens, places, "amin")[tokens]
        table[tokens], scores[tokens] = best.indices[first], best.values[first].to(scores)

    def successors_of(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.successors[tokens], self.scores[tokens]


def recycling(target: PreTrainedModel, **fields: Any) -> DominoDraftModel:
    """Make a drafter that needs no training: it proposes what the target has predicted before (arXiv 2408.08696).

    For each token it keeps the eight most likely successors, as the target last predicted them. Use the same drafter
    for all calls, because it keeps what it has learned from one call to the next.

    Args:
        target (`PreTrainedModel`): The target, on its device.
        fields: Fields of [`DominoConfig`], such as `draft_tree_size`, the most nodes of a tree (defaults to 32; rounds
            also choose 4, 8 or 16), or `block_size` (defaults to paths of 8 tokens).

    Raises:
        ValueError: If the target is not a model, or a field is unknown or out of range.

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
        raise invalid_argument("target", "a causal language model", type(target).__name__, remedy)
    device = embeddings.weight.device
    config = RecyclingConfig.for_target(target.config, **fields)
    with torch.inference_mode(False):  # the table must stay writable in every autograd mode
        return RecyclingModel(config).to("cpu" if device.type == "meta" else device)

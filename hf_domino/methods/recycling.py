"""Token recycling: no weights, only a table of each token's most likely successors (arXiv 2408.08696).

Other methods discard the target's predictions once a position is verified, accepted or not. Token recycling keeps the M
most likely tokens: they become the successors of the token at that position, and later rounds propose trees built from
the table.

Unlike in the paper, a prediction does not replace the one before it but is averaged with it, and each pair of tokens
has successors of its own, which are proposed where the pair has been seen. On texts of SmolLM2-135M-Instruct, trees of
eight nodes then emit 1.71 tokens a round in place of 1.52: the averages add 0.14 and the pairs 0.05. With successors
of three tokens they emit fewer, and with the target's other tokens at the last position (LogitSpec, arXiv 2507.01449)
0.01 more, which costs more time than it saves.

Shapes: N positions of a verification forward, of all sequences, M successors, V vocabulary, R rows of the table.
"""

from __future__ import annotations

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel, TemperatureLogitsWarper

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.methods.modeling import DominoDraftModel
from hf_domino.methods.scorer import Drafted, Scorer, along
from hf_domino.targets.view import TargetModel

NUM_SUCCESSORS = 8  # per token (arXiv 2408.08696)
# Rows for pairs of tokens, a prime. A pair that falls on the row of another one replaces it.
NUM_PAIRS = 65_521
KEPT = 0.6  # the share of a row that stays when its token is seen again; 0.5 and 0.7 are as good, 0.9 is worse


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
    )

    @classmethod
    def choose_layers(cls, num_target_layers: int, num_captured: int | None = None) -> list[int]:
        """Choose the last layer: token recycling reads none, and the last one costs least to capture."""
        return [num_target_layers - 1]


class RecyclingModel(DominoDraftModel):
    """Token recycling: a table of the successors of tokens and of pairs of tokens, with the chance of each."""

    config_class = RecyclingConfig
    config: RecyclingConfig

    def build(self) -> None:
        # The rows of the tokens come first, then those of the pairs.
        size = self.config.vocab_size + NUM_PAIRS, min(NUM_SUCCESSORS, self.config.vocab_size)
        self.successors = nn.Parameter(torch.empty(size, dtype=torch.long), requires_grad=False)
        self.scores = nn.Parameter(torch.empty(size), requires_grad=False)
        self.pairs = nn.Parameter(torch.empty(NUM_PAIRS, dtype=torch.long), requires_grad=False)  # of each row's pair
        self.forget()

    @torch.no_grad()
    def forget(self) -> None:
        """Empty the table, so that the drafter is like a new one."""
        self.successors.copy_(torch.arange(self.successors.shape[1]))
        self.scores.fill_(-torch.inf)  # until a row is seen
        self.pairs.fill_(-1)

    def learn(self, tokens: torch.Tensor, before: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Average what the logits predict with what the rows of the tokens and of the pairs hold.

        Returns:
            `tuple`: The row of each token and that of its pair, `[N, 2]`; the successors in these rows and their
            scores, `[N, 2, M]` each; and the pair that the second row belongs to, `[N]`.
        """
        best = logits.topk(self.successors.shape[1], dim=1)
        # Without the zeros, NaN from logits that are not finite would stay in a row for good.
        chances = best.values.softmax(dim=1).nan_to_num(0.0).to(self.scores).repeat(2, 1)
        token_ids = best.indices.repeat(2, 1)
        pairs, places = self._pairs_of(tokens, before)
        rows = torch.cat((tokens, self.config.vocab_size + places))  # [R], first those of tokens, then those of pairs
        is_same_pair = torch.cat((torch.ones_like(tokens, dtype=torch.bool), self.pairs[places] == pairs))
        old_ids = self.successors[rows]
        old = self.scores[rows].exp().masked_fill(~is_same_pair[:, None], 0.0)
        kept = KEPT * (old[:, :1] > 0)
        is_old = token_ids[:, :, None] == old_ids[:, None]  # [R, M, M]
        chances = (1 - kept) * chances + kept * (is_old * old[:, None]).sum(dim=2)
        old = kept * old.masked_fill(is_old.any(dim=1), 0.0)
        merged = torch.cat((chances, old), dim=1).topk(token_ids.shape[1], dim=1)
        token_ids = torch.cat((token_ids, old_ids), dim=1).gather(1, merged.indices)
        # If a row occurs more than once, its first occurrence counts. All occurrences have the same values, because
        # the order in which they are written can be undefined.
        first = (rows[:, None] == rows).int().argmax(dim=1)
        learnt = (rows, token_ids[first], merged.values.log()[first])
        by_token = (each.unflatten(0, (2, -1)).transpose(0, 1) for each in learnt)
        return *by_token, pairs[first[len(tokens) :] - len(tokens)]

    def keep(self, *learnt: torch.Tensor) -> None:
        rows, token_ids, scores, pairs = learnt
        self.successors[rows] = token_ids
        self.scores[rows] = scores
        self.pairs[rows[..., 1] - self.config.vocab_size] = pairs

    def successors_of(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and scores `[..., M]` of the successors of tokens `[...]`, given the token before each of them."""
        pairs, places = self._pairs_of(tokens, before)
        rows = torch.where(self.pairs[places] == pairs, self.config.vocab_size + places, tokens)
        return self.successors[rows], self.scores[rows]

    def _pairs_of(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A number for each pair of tokens, and its place among the rows of pairs."""
        pairs = before * self.config.vocab_size + tokens
        return pairs, pairs % NUM_PAIRS

    def scorer(self, target: TargetModel, reads_host: bool = True) -> Scorer:
        return SuccessorScorer(self, target)


class SuccessorScorer(Scorer):
    """Scores the successors that the target has found most likely after the last tokens of each branch.

    Its rounds begin with the tokens before the anchors, `[B, P]`, in place of draft hidden states.
    """

    is_parallel = False
    num_passes = None
    min_nodes = 0  # drafting costs next to nothing, and after a token that was never seen there is nothing to propose
    reads_processors = (TemperatureLogitsWarper,)

    def begin(self, drafted: Drafted) -> None:
        self._last = drafted.hidden[:, :1]  # the last token of each branch so far, [B, L]
        self.advance(drafted.anchors)

    def advance(self, tokens: torch.Tensor, parents: torch.Tensor | None = None) -> None:
        super().advance(tokens, parents)
        columns, scores = self.drafter.successors_of(tokens, along(parents, self._last))  # [B, L, M]
        self._last = tokens
        self.columns = columns.flatten(0, 1)[:, None]
        self.logits = scores.flatten(0, 1)[:, None]


def recycling(target: PreTrainedModel, **fields: Any) -> DominoDraftModel:
    """Make a drafter that needs no training: it proposes what the target has predicted before (arXiv 2408.08696).

    For each token, and for pairs of tokens, it keeps the eight successors that the target has found most likely. Use
    the same drafter for all calls, because it keeps what it has learned from one call to the next.

    Args:
        target (`PreTrainedModel`): The target, on its device.
        fields: Fields of [`DominoConfig`], such as `draft_tree_size`, the most nodes of a tree (defaults to 32; rounds
            also choose 16 and, on a CPU, 4 or 8), or `block_size` (defaults to paths of 8 tokens).

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

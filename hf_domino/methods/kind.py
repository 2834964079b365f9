"""What is asked of a kind of drafter: all that configurations, files, decoding, training and cards know of one.

A kind turns what it reads of the target into draft hidden states, one for each proposal, of which lm_head makes base
logits. Those are a distribution of each position by itself; a correction head makes the distribution of a path of them,
and is called as Domino's is. Or a kind reads its own drafts: then there is one draft hidden state behind the anchors,
and [`~Kind.branches`] gives those behind the tokens that were chosen.

Shapes: B batch, S sequence length, C context positions, N blocks per row, K block size, P proposals, H hidden size,
D tokens that are drafted, L lanes, or layers of the target that are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hf_domino._common.refusal import refusal
from hf_domino.methods.context import ContextCache

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig
    from hf_domino.methods.block import CorrectionHead
    from hf_domino.target.view import TargetModel

Shapes = dict[str, tuple[int, ...]]
# Goes on with lanes behind these `[B, L]`, each by a token `[B, L]`: draft hidden states `[B, L, H]`. What it knows of
# a round's lanes is never in the context's cache.
Branches = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
KINDS: dict[str, type[Kind]] = {}  # by `projector_type`; `hf_domino.methods` puts them in
# What correction heads are told by; and what is done around a block's layers.
HEAD_FIELDS = (
    *("gru_hidden_dim", "emb_dim", "markov_rank", "markov_head_type"),
    *("selector_rank", "selector_top_k"),
)
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
CONVOLUTION = "conv_kernel_size"
OF_BLOCKS = (CONVOLUTION, *SCALES)
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": None, "shift_label": True, "pure_draft_prefix_len": 0}
ONE_LAYER |= dict.fromkeys(OF_BLOCKS)


class Kind:
    """A kind of drafter: the class says what holds of all drafters of it, an instance drafts by the weights of one.

    Args:
        drafter (`DominoDraftModel`): A drafter of this kind, which has the weights and the configuration.
    """

    title: str  # its name in messages
    article = "a"  # before the name
    link: str  # its name in cards, as Markdown
    papers: tuple[str, ...] = ()  # cited with it, in `cards/papers`
    way = ""  # how it drafts, in a card's sentence
    drafts_in_turn = False  # whether a draft reads those before it
    head_layers: Mapping[str, str] = {}  # of its correction head: what is read past any wrapper, and a weight of each
    head_fields: tuple[str, ...] = ()  # fields of its head that files tell
    head_options: tuple[str, ...] = ()  # and those that they may leave out
    frozen: tuple[str, ...] = ()  # modules that no training of ours trains
    has_table = False  # whether it has no weights, but a table of tokens that the target fills while it generates
    may_ask_target = False  # whether files leave it to the target which layers are read, as EAGLE-3's do
    num_captured = 5  # most layers that are read unless they are given; as in the releases of Domino and DFlash
    defaults: Mapping[str, Any] = {}  # fields of a new drafter that do not follow its target
    fixed: Mapping[str, Any] = {}  # fields that do nothing in it, each with the value it must have
    own: Mapping[str, Any] = {}  # fields that do nothing in other kinds, each with the value it has there
    unread: tuple[str, ...] = ()  # fields that do nothing in it, which a new drafter is not given
    lacks: Mapping[str, str] = {}  # what all other kinds can do, and why this one cannot
    loss_decay: float | None = None  # positions after which a weight of its training falls to 1/e; None: by the block

    def __init__(self, drafter: Any):
        self.drafter, self.config = drafter, drafter.config

    @classmethod
    def shapes(cls, config: DominoConfig) -> Shapes:
        """Shapes of all tensors that a configuration describes, by name, of which none is made."""
        described = nn.Module()
        described.config = config
        with torch.device("meta"):
            cls(described).build()
        found = {name: tuple(weight.shape) for name, weight in described.named_parameters()}
        return found if config.draft_vocab_size is None else found | {"d2t": (config.draft_vocab_size,)}

    @classmethod
    def head_modules(cls) -> list[str]:
        """The parts of a drafter that its correction head is made of; none where drafts are taken as they are."""
        return list(dict.fromkeys(name.split(".")[0] for name in cls.head_layers))

    @classmethod
    def layer_ids(cls, num_target_layers: int, num_captured: int | None = None) -> list[int]:
        """The layers that a new drafter reads: spread over the target, as the DFlash releases do (arXiv 2602.06036).

        The last layer is never picked: Transformers returns its hidden state after the final norm. Where the releases'
        rule would repeat a layer or leave the range (small targets), there are fewer layers.
        """
        if num_target_layers < 2:
            raise ValueError(
                f"num_target_layers must be at least 2, got {num_target_layers}: a drafter reads inner layers."
            )
        for count in range(num_captured or cls.num_captured, 1, -1):
            ids = [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
            if ids == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= num_target_layers - 2:
                return ids
        return [min(num_target_layers // 2, num_target_layers - 2)]

    @classmethod
    def refuse_what_it_lacks(cls, feature: str) -> None:
        """Refuse a feature, such as `"export"`, that this kind does not have, by name."""
        if feature in cls.lacks:
            others = " or ".join(kind.title for kind in KINDS.values() if not {feature, "training"} & kind.lacks.keys())
            raise refusal(f"the drafter's kind with {feature}", others, cls.title, cls.lacks[feature])

    def build(self) -> None:
        """Give the drafter its weights."""
        raise NotImplementedError

    def fuse_context(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Context features `[B, C, H]` of L hidden states `[B, C, H]`, position by position."""
        raise NotImplementedError

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the weights on arguments of the kind's own, as the methods below give them."""
        raise NotImplementedError

    def draft(
        self,
        target: TargetModel,
        anchors: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor | None,
        feature_positions: torch.Tensor | None,
        cache: Any,
        counts: Sequence[int] | None = None,
        endings: Callable[[int], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Store new context, and draft behind the anchors, which have seen all of it.

        Args:
            target (`TargetModel`): For embeddings.
            anchors (`torch.Tensor`): Tokens `[B, 1]`; `[B, 0]` to store the context alone.
            positions (`torch.Tensor`): Of the anchors, `[B, 1]`.
            features (`torch.Tensor`, *optional*): New context `[B, C, H]`.
            feature_positions (`torch.Tensor`, *optional*): Its positions `[B, C]`.
            cache (`ContextCache` or `FixedContext`): The kind's [`~Kind.new_context`], or one of fixed shape.
            counts (`Sequence[int]`, *optional*): How much of each row's new context is valid, the first positions.
            endings (`Callable`, *optional*): Gives the last tokens of the texts, so many of each row: what stands
                behind the last positions of the context, the anchors behind the last.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, P, H]`, or `[B, 0, H]`; `[B, 1, H]` of a kind with `branches`.
        """
        raise NotImplementedError

    def branches(
        self, target: TargetModel, hidden: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> Branches | None:
        """The lanes of a round behind what [`~Kind.draft`] gave `[B, 1, H]`; None where drafts read no others."""
        return None

    def logits(self, target: TargetModel, hidden: torch.Tensor) -> torch.Tensor:
        """Base logits `[..., D]` in fp32 of draft hidden states `[..., H]`, on their device."""
        raise NotImplementedError

    @property
    def head(self) -> CorrectionHead | None:
        """What corrects its drafts token by token; None where they are taken as they are."""
        return None

    def confidence(self, draft_hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Chances `[N]` that drafts of these `[N, H]` behind tokens `[N]` are accepted, where weights tell them."""
        return None

    def head_parameters(self) -> list[nn.Parameter]:
        """Weights that turn draft hidden states into logits, beside the target's lm_head."""
        return []

    def new_context(self) -> ContextCache:
        """An empty cache of its context."""
        return ContextCache(self.config.num_hidden_layers)

    def draft_blocks(
        self,
        target: TargetModel,
        input_ids: torch.Tensor,
        features: torch.Tensor | None,
        anchors: torch.Tensor,
    ) -> torch.Tensor:
        """Draft behind many anchors of known text side by side, each as [`~Kind.draft`] does.

        Args:
            target (`TargetModel`): For embeddings.
            input_ids (`torch.Tensor`): `[B, S]`.
            features (`torch.Tensor`, *optional*): Context `[B, C, H]` of the first C positions, enough to reach all
                anchors; None to draft without any context.
            anchors (`torch.Tensor`): Positions `[B, N]`, -1 where a row has fewer; increasing ones are the fastest.

        Returns:
            `torch.Tensor`: Draft hidden states `[B, N, K, H]`; proposals are those from `label_offset` on.
        """
        raise NotImplementedError

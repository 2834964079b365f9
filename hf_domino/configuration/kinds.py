"""The kinds of drafters, as configurations and files know them: `projector_type` names one.

The other half of a kind, what it does with its weights, is in `drafter.kinds`.

Shapes: H hidden size, L captured layers, G GRU width, R low rank, D tokens that are drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_domino._common.refusal import refusal
from hf_domino.configuration.from_target import MAX_CAPTURED_LAYERS, default_target_layer_ids

if TYPE_CHECKING:
    from hf_domino.configuration import DominoConfig

Shapes = dict[str, tuple[int, ...]]
NUM_SUCCESSORS = 8  # of a token, in token recycling (arXiv 2408.08696)
_FIFTH_LESS = -1 / math.log(0.8)  # positions after which weights of 0.8^i fall to 1/e
MOST_LAYERS = 10**6  # of a target that does not say how many it has


@dataclass(frozen=True)
class KindFacts:
    """What is known of a kind of drafter before one is built.

    Args:
        title (`str`): Its name in messages.
        link (`str`): Its name in cards, as Markdown.
        papers (`tuple[str, ...]`): What is cited with it, in `cards/papers`.
        shapes (`Callable`): Shapes of its weights by name, from a [`DominoConfig`].
        repeated (`tuple[str, str]`): Its list of modules, and the field that says how many there are.
        context (`Callable`): Layers of its context cache, their heads and the width of a head.
        way (`str`, *optional*, defaults to `""`): What a card says of how it drafts.
        drafts_in_turn (`bool`, *optional*, defaults to `False`): Whether a draft reads those before it.
        has_correction_head (`bool`, *optional*, defaults to `False`): Whether drafts are corrected token by token.
        reads_last_state (`bool`, *optional*, defaults to `False`): Whether it reads what the target's lm_head reads,
            in place of what inner layers give.
        has_table (`bool`, *optional*, defaults to `False`): Whether it has no weights, but a table of tokens that the
            target fills while it generates.
        may_ask_target (`bool`, *optional*, defaults to `False`): Whether files leave it to the target which layers are
            read: then they are EAGLE-3's, counted from its first, middle and last.
        num_captured (`int`, *optional*): Most layers that are read unless they are given.
        defaults (`Mapping`, *optional*): Fields of a new drafter that do not follow its target.
        fixed (`Mapping`, *optional*): Fields that say nothing of it, each with the value it must have.
        own (`Mapping`, *optional*): Fields that say nothing of other kinds, each with the value it has there.
        unread (`tuple[str, ...]`, *optional*): Fields that it has no use for, which a new drafter is not given.
        lacks (`Mapping`, *optional*): What all other kinds can do, and why this one cannot.
        loss_decay (`float`, *optional*): Positions after which a weight of its training falls to 1/e; by the size of
            the block if unset.
    """

    title: str
    link: str
    papers: tuple[str, ...]
    shapes: Callable[[DominoConfig], Shapes]
    repeated: tuple[str, str]
    context: Callable[[DominoConfig], tuple[int, int, int]]
    way: str = ""
    drafts_in_turn: bool = False
    has_correction_head: bool = False
    reads_last_state: bool = False
    has_table: bool = False
    may_ask_target: bool = False
    num_captured: int = MAX_CAPTURED_LAYERS
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    loss_decay: float | None = None

    def readable(self, num_target_layers: int | None, is_told: bool = True) -> range:
        """Target layers whose outputs it may read; not the last one where its files do not tell how many there are."""
        last = (MOST_LAYERS if num_target_layers is None else num_target_layers) - 1
        return range(last, last + 1) if self.reads_last_state else range(last + is_told)

    @property
    def article(self) -> str:
        """What stands before its name."""
        return "an" if self.title[0] in "AEIOU" else "a"

    @property
    def why_readable(self) -> str:
        """Why these and no others."""
        if self.reads_last_state:
            return f"{self.title} reads what lm_head reads, the last layer's output after the final norm"
        return "the last one's is read after the final norm, and only where num_target_layers is told"

    def layer_ids(self, num_target_layers: int, num_captured: int | None = None) -> list[int]:
        """The layers that a new drafter reads."""
        if self.reads_last_state:
            return [num_target_layers - 1]
        ids = [1, num_target_layers // 2 - 1, num_target_layers - 4]
        if self.may_ask_target and ids == sorted(set(ids)) and num_captured in (None, len(ids)):
            return ids
        return default_target_layer_ids(num_target_layers, num_captured or self.num_captured)

    def check(self, config: DominoConfig) -> None:
        """Refuse fields that say nothing of this kind.

        Args:
            config ([`DominoConfig`]): Of a drafter of this kind.

        Raises:
            ValueError: If one is not as it must be.
        """
        fixed = dict(self.fixed)
        for kind in KINDS.values():
            fixed |= {} if kind is self else kind.own
        for name, value in fixed.items():
            if getattr(config, name) != value:
                field = f"{name} of {self.article} {self.title} drafter"
                raise refusal(
                    field, value, getattr(config, name), "Leave it out; no other drafter of this kind can be run."
                )

    def check_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Refuse fields given for a new drafter that this kind has no use for.

        Args:
            overrides (`Mapping`): The fields.

        Raises:
            ValueError: Naming those.
        """
        if unread := [name for name in self.unread if name in overrides]:
            field = f"{', '.join(unread)} of {self.article} {self.title} drafter"
            raise refusal(field, "left out", "given", "It has no such part.")

    def refuse_what_it_lacks(self, feature: str) -> None:
        """Refuse a feature that this kind does not have, by name.

        Args:
            feature (`str`): Such as `"lora_rank"`.

        Raises:
            ValueError: If it is among what it lacks.
        """
        if feature in self.lacks:
            others = " or ".join(kind.title for kind in KINDS.values() if not {feature, "training"} & kind.lacks.keys())
            raise refusal(f"the drafter's kind with {feature}", others, self.title, self.lacks[feature])


def _block_shapes(config: DominoConfig) -> Shapes:
    """Of the backbone that drafts a block."""
    width = config.hidden_size
    found: Shapes = {
        "fc": (width, config.num_captured * width),  # [H, L * H]
        "hidden_norm": (width,),
        "norm": (width,),
    }
    for index in range(config.num_hidden_layers):
        found |= {f"layers.{index}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return {f"{name}.weight": shape for name, shape in found.items()}


def _layer_shapes(config: DominoConfig) -> Shapes:
    head = config.head_dim
    return _plain_layer_shapes(config, config.hidden_size) | {
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
    }


def _plain_layer_shapes(config: DominoConfig, num_read: int) -> Shapes:
    """Of a layer whose attention reads vectors of this width."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    return {
        "self_attn.q_proj": (queries, num_read),
        "self_attn.k_proj": (keys, num_read),
        "self_attn.v_proj": (keys, num_read),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }


def _domino_shapes(config: DominoConfig) -> Shapes:
    """Of the backbone and the correction head."""
    width, state, rank = config.hidden_size, config.gru_hidden_dim, config.emb_dim
    return _block_shapes(config) | {
        "embed_proj.0.weight": (rank, width + state),
        "embed_proj.2.weight": (config.draft_width, rank),
        "prefix_gru.weight_ih_l0": (3 * state, width),
        "prefix_gru.weight_hh_l0": (3 * state, state),
    }


def _keys_and_values(config: DominoConfig) -> tuple[int, int, int]:
    return config.num_hidden_layers, config.num_key_value_heads, config.head_dim


def _medusa_shapes(config: DominoConfig) -> Shapes:
    return {f"heads.{index}.weight": (config.hidden_size, config.hidden_size) for index in range(config.block_size)}


def _eagle3_shapes(config: DominoConfig) -> Shapes:
    width, num_captured = config.hidden_size, config.num_captured
    found: Shapes = {"fc": (width, num_captured * width), "norm": (width,)}
    layer = _plain_layer_shapes(config, 2 * width) | {"hidden_norm": (width,)}
    found |= {f"layers.0.{name}": shape for name, shape in layer.items()}
    if config.norm_before_fc:
        found["input_norm"] = (num_captured * width,)
    if config.fc_norm:
        found |= {f"fc_norm.{index}": (width,) for index in range(num_captured)}
    if config.own_embeddings:
        found["embed_tokens"] = (config.vocab_size, width)
    if config.own_lm_head:
        found["lm_head"] = (config.draft_width, width)
    return {f"{name}.weight": shape for name, shape in found.items()}


def _halves_of_states(config: DominoConfig) -> tuple[int, int, int]:
    return 1, 1, config.hidden_size // 2


def _table_of_successors(config: DominoConfig) -> Shapes:
    size = config.vocab_size, min(NUM_SUCCESSORS, config.vocab_size)
    return {"successors": size, "scores": size}


def _pool_of_ngrams(config: DominoConfig) -> Shapes:
    return {"ngrams": (config.vocab_size, config.num_candidates, config.ngram_size - 1)}


NO_HEAD = "It has no correction head that reads a prefix; leave it out."
_DFLASH = "[DFlash](https://arxiv.org/abs/2602.06036)"
_LAYERS = ("layers", "num_hidden_layers")
_ONE_LAYER = {"num_hidden_layers": 1, "layer_types": None, "shift_label": True, "pure_draft_prefix_len": 0}
_WITH_TABLE: dict[str, Any] = {
    "fixed": _ONE_LAYER | {"acceptance_rule": "coupled", "draft_vocab_size": None},
    "context": lambda config: (0, 1, 1),
    "reads_last_state": True,  # the least that a drafter is given
    "has_table": True,
    "unread": ("intermediate_size", "mask_token_id", "gru_hidden_dim", "emb_dim"),
    "lacks": dict.fromkeys(
        ("training", "plan", "export", "save_pretrained", "attach", "check_fit", "explain_round"),
        "It has no weights, and fills its table while hf_domino's own loop generates.",
    )
    | {"cache_implementation='static'": "Its trees are no rounds of fixed shape yet; leave it out."},
}

KINDS: dict[str, KindFacts] = {
    "domino": KindFacts(
        "Domino",
        "[Domino](https://arxiv.org/abs/2605.29707)",
        ("domino", "dflash"),
        _domino_shapes,
        _LAYERS,
        _keys_and_values,
        way=f" (a {_DFLASH} backbone), a GRU corrects them token by token",
        has_correction_head=True,
        defaults={"pure_draft_prefix_len": 1},  # which SGLang wants, and which costs nothing: docs/results.md
    ),
    "dflash": KindFacts(
        "DFlash",
        f"plain {_DFLASH}",
        ("dflash",),
        _block_shapes,
        _LAYERS,
        _keys_and_values,
        lacks={"own_prefix_share": NO_HEAD},
    ),
    "medusa": KindFacts(
        "Medusa",
        "[Medusa](https://arxiv.org/abs/2401.10774)",
        ("medusa",),
        _medusa_shapes,
        ("heads", "block_size"),
        _halves_of_states,
        way=" (a head for each, on the target's last hidden state)",
        reads_last_state=True,
        defaults={"block_size": 5, "num_hidden_layers": 1},
        fixed=_ONE_LAYER,
        unread=("intermediate_size", "mask_token_id", "gru_hidden_dim", "emb_dim"),
        lacks={
            "own_prefix_share": NO_HEAD,
            "lora_rank": "Its heads are small; train them whole.",
            "start_from_target": "Its heads begin as the target's own guess anyway; leave it out.",
            "block_size": "Each of its heads is for one position; train a new drafter.",
            "plan": "What its training takes is not counted yet.",
            "export": "No engine reads such heads; save_pretrained writes hf_domino's own format.",
            "fsdp": "Its heads fit on one device; leave it out.",
            "gradient_checkpointing": "Its heads keep hardly anything for the backward pass; leave it out.",
        },
        loss_decay=_FIFTH_LESS,  # arXiv 2401.10774
    ),
    "eagle3": KindFacts(
        "EAGLE-3",
        "[EAGLE-3](https://arxiv.org/abs/2503.01840)",
        ("eagle3",),
        _eagle3_shapes,
        _LAYERS,
        _keys_and_values,
        way=" (one layer, which reads what it has drafted)",
        drafts_in_turn=True,
        may_ask_target=True,
        num_captured=3,
        defaults={"block_size": 7, "num_hidden_layers": 1},
        fixed=_ONE_LAYER,
        own=dict.fromkeys(
            ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "own_embeddings", "own_lm_head"), False
        ),
        unread=("mask_token_id", "gru_hidden_dim", "emb_dim"),
        lacks={
            "own_prefix_share": "It reads its own drafts always; leave it out.",
            "lora_rank": "It is one layer; train it whole.",
            "start_from_target": "Its layer reads embeddings beside states; leave it out.",
            "plan": "What its training takes is not counted yet.",
            "export": "Engines' layouts are read, not written; save_pretrained writes hf_domino's own format.",
            "fsdp": "It fits on one device; leave it out.",
            "gradient_checkpointing": "It has one layer; leave it out.",
            "cache_implementation='static'": "Its lanes are no rounds of fixed shape yet; leave it out.",
            "explain_round": "What it drafts depends on the path; look at drafter.stats.",
        },
        loss_decay=_FIFTH_LESS,  # arXiv 2503.01840
    ),
    "recycling": KindFacts(
        "token recycling",
        "[token recycling](https://arxiv.org/abs/2408.08696)",
        (),
        _table_of_successors,
        ("successors", "num_hidden_layers"),
        defaults={"block_size": 8, "num_hidden_layers": 1, "draft_tree_size": 32},
        **_WITH_TABLE,
    ),
    "lookahead": KindFacts(
        "lookahead",
        "[lookahead](https://arxiv.org/abs/2402.02057)",
        (),
        _pool_of_ngrams,
        ("ngrams", "num_hidden_layers"),
        defaults={"block_size": 16, "num_hidden_layers": 1, "draft_tree_size": 64},
        own={"ngram_size": 5, "window_size": 7, "num_candidates": 7},  # as its authors begin
        **_WITH_TABLE,
    ),
}

"""Facts about a drafting method that are not fields of its configuration and are never saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import SIZES
from hf_domino.configuration.from_target import spread_layers
from hf_domino.configuration.registry import config_classes

# Modules read these only when they are built, and some of them can change without changing the shape of any tensor.
BUILT_WITH = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "rope_interleaved", "attention_dropout"),
)


class MethodFacts:
    """Facts about a method for files, training, decoding and messages; a configuration class overrides what differs."""

    title: ClassVar[str]  # its name in messages
    article = "a"  # before the name
    head_layers: ClassVar[Mapping[str, str]] = {}  # layers of the correction head that must not be wrapped -> a weight
    frozen: ClassVar[Sequence[str]] = ()  # modules that are never trained here
    needs_layer_ids = True  # whether files must say which layers of the target are read
    learns_while_drafting = False  # whether it has no weights, but a table that the target fills while it generates
    smaller_trees: ClassVar[Sequence[int]] = ()  # sizes that rounds may also choose, if `draft_tree_size` is a number
    loss_decay: ClassVar[float | None] = None  # positions over which a loss weight falls to 1/e; None: by block size
    most_captured = 5  # target layers that a new drafter reads, as in the releases of Domino and DFlash
    defaults: ClassVar[Mapping[str, Any]] = {}  # fields of a new drafter that do not follow its target
    fixed: ClassVar[Mapping[str, Any]] = {}  # shared fields without effect, each with the value that it must have
    unread: ClassVar[Sequence[str]] = ()  # shared fields without effect that can have any value
    built_with: ClassVar[Sequence[str]] = BUILT_WITH  # fields that no view of a drafter can change
    ranges: ClassVar[dict[str, tuple[int, int]]] = SIZES  # of its integer fields
    lacks: ClassVar[Mapping[str, str]] = {}  # features that it does not support, each with the reason

    def check_supports(self, feature: str) -> None:
        """Raise an error if the method does not support a feature, such as `"export"`.

        Raises:
            ValueError: If it lacks the feature; the message says why, and which methods have it.
        """
        if feature in self.lacks:
            others = [each.title for each in config_classes() if not {feature, "training"} & each.lacks.keys()]
            raise invalid_argument(
                f"the drafter's method with {feature}", " or ".join(others), self.title, self.lacks[feature]
            )

    @classmethod
    def choose_layers(cls, num_target_layers: int, num_captured: int | None = None) -> list[int]:
        """Return the layers that a new drafter reads, spread over the target as in DFlash (arXiv 2602.06036)."""
        return spread_layers(num_target_layers, num_captured or cls.most_captured)

    @classmethod
    def sizes_for(cls, hidden_size: int) -> dict[str, int]:
        """Return the method's own fields that follow the target's hidden size, for a new drafter."""
        return {}

    @classmethod
    def headless(cls) -> Any:
        """Return the method with the same backbone but without a correction head; None if there is no such method."""
        return None

    @classmethod
    def fields_beside(cls) -> set[str]:
        """Return the head sizes that a method without a head ignores, so that one recipe fits both methods."""
        alike = [each for each in config_classes() if each.headless() is cls]
        return {name for each in alike for name in each.sizes_for(1)}.difference(cls.sizes_for(1))

    def follow_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set the fields that another project's files only reveal by their tensors, whose shapes are given by name."""

    @classmethod
    def head_modules(cls) -> list[str]:
        """Return the modules that form the correction head; none if drafts are not corrected."""
        return list(dict.fromkeys(name.split(".")[0] for name in cls.head_layers))

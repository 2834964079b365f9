"""What is known of a method of drafting, beside the fields of its configuration; none of it is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.checks import SIZES
from hf_domino.configuration.from_target import spread_layers
from hf_domino.configuration.registry import config_classes

# Modules keep these from when they were made, and some would fit the same tensors with others.
BUILT_WITH = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
    *("rope_parameters", "rope_interleaved", "attention_dropout"),
)


class MethodFacts:
    """What files, training, decoding and messages ask of a method. A configuration class sets what differs."""

    title: ClassVar[str]  # its name in messages
    article = "a"  # before the name
    head_layers: ClassVar[Mapping[str, str]] = {}  # of its correction head: what is read past wrappers, and a weight
    frozen: ClassVar[Sequence[str]] = ()  # modules that no training here trains
    needs_layer_ids = True  # whether files must say which layers of the target are read
    learns_while_drafting = False  # whether it has a table that the target fills while it generates, and no weights
    loss_decay: ClassVar[float | None] = None  # positions after which a weight in training falls to 1/e; by block size
    most_captured = 5  # layers that a new drafter reads, as those of the releases of Domino and DFlash do
    defaults: ClassVar[Mapping[str, Any]] = {}  # fields of a new drafter that do not follow its target
    fixed: ClassVar[Mapping[str, Any]] = {}  # shared fields that do nothing in it, each with the value it must have
    unread: ClassVar[Sequence[str]] = ()  # shared fields that do nothing in it, with any value
    built_with: ClassVar[Sequence[str]] = BUILT_WITH  # fields that no view of a drafter can change
    ranges: ClassVar[dict[str, tuple[int, int]]] = SIZES  # of its fields that are whole numbers
    lacks: ClassVar[Mapping[str, str]] = {}  # features that it does not support, each with the reason

    def check_supports(self, feature: str) -> None:
        """Refuse a feature that the method does not have, such as `"export"`, by name.

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
        """The layers that a new drafter reads: spread over the target, as the DFlash releases do (arXiv 2602.06036)."""
        return spread_layers(num_target_layers, num_captured or cls.most_captured)

    @classmethod
    def sizes_for(cls, hidden_size: int) -> dict[str, int]:
        """The method's own fields of a new drafter that follow the target's hidden size."""
        return {}

    @classmethod
    def headless(cls) -> Any:
        """The method of the same backbone that has no correction head; None where there is no such method."""
        return None

    @classmethod
    def fields_beside(cls) -> set[str]:
        """Sizes that a new drafter without a head reads over: those of heads, so that one recipe makes both."""
        alike = [each for each in config_classes() if each.headless() is cls]
        return {name for each in alike for name in each.sizes_for(1)}.difference(cls.sizes_for(1))

    def follow_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Set the fields that only the tensors of another project's files tell, from the shapes of these by name."""

    @classmethod
    def head_modules(cls) -> list[str]:
        """The modules of a drafter that its correction head consists of; none where drafts are taken as they are."""
        return list(dict.fromkeys(name.split(".")[0] for name in cls.head_layers))

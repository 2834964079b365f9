"""The card of a drafter: one template for trainer, recipe and publishing, merged into the card that is there.

`render` makes a card, `sections` merges and compares cards, `training` tells what a trainer recorded, `pushing` has
Transformers' own `push_to_hub` use all that. What was measured is told by `benchmark`, where rows live.
"""

from hf_domino.cards.render import render_card
from hf_domino.cards.sections import UnfitCard, check_card, drop_section, merge_card, read_sections
from hf_domino.cards.training import training_section

__all__ = [
    "UnfitCard",
    "check_card",
    "drop_section",
    "merge_card",
    "read_sections",
    "render_card",
    "training_section",
]

"""The card of a drafter: one template for trainer, recipe and publishing, merged into the card that is there.

`render` makes a card, `sections` merges cards, `training` tells what a trainer recorded. What was measured is told by
`publishing`, above `benchmark`, where rows are read.
"""

from hf_domino.cards.render import render_card
from hf_domino.cards.sections import merge_card, read_sections
from hf_domino.cards.training import training_section

__all__ = ["merge_card", "read_sections", "render_card", "training_section"]

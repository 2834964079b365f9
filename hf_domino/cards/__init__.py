"""The card of a drafter: one template for trainer, recipe and publishing, merged into the card that is there.

`render` makes a card, `sections` merges cards, `training` tells what a trainer recorded. What was measured is told by
`publishing`, above `benchmark`, where rows are read.
"""

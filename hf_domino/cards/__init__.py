"""Make the card of a drafter from one template, and merge it into the card that is there.

`render` makes a card, `sections` merges cards, and `training` describes what a trainer recorded. `publishing` adds the
measured results.
"""

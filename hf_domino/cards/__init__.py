"""Make the card of a drafter from one template, and merge it into an existing card.

`render` makes a card, `sections` merges cards, and `training` describes a training from the record of its run.
`publishing` adds the measured results.
"""

"""How far a round drafts, and whether it drafts at all."""

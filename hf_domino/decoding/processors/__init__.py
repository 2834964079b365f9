"""Stock logits processors by the few tokens they touch: all positions of a block at once, or a few candidates."""

"""Does it fit, what does a round do, how fast is it, and what made it so: measurements of a pair."""

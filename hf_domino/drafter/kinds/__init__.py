"""What the kinds of drafters do: `kind` says what is asked of one, each other module answers."""

"""Names and limits that help and errors tell, and that several packages share."""

# Of which the first that a record has is its prompt.
PROMPT_FIELDS = "`messages`, `conversations`, `prompt` or `text`"
MOST_SEED = 2**32 - 1  # as in Transformers and NumPy

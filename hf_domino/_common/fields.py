"""Field names and limits that several packages show in their help and errors."""

# The first of these fields that a record has is its prompt.
PROMPT_FIELDS = "`messages`, `conversations`, `prompt` or `text`"
MOST_SEED = 2**32 - 1  # the limit of Transformers and NumPy

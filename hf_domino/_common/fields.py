"""Fields of records, as help and errors name them."""

# Of which the first that a record has is its prompt.
PROMPT_FIELDS = "`messages`, `conversations`, `prompt` or `text`"

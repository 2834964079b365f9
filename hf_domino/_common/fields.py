"""Field names and limits that several packages show in their help and errors."""

# The first of these fields that a record has is its prompt.
PROMPT_FIELDS = "`messages`, `conversations`, `prompt` or `text`"
# The help of --prompts in commands that ask a target with its drafter.
PROMPTS_HELP = (
    f"file of records with {PROMPT_FIELDS}, or chat, code, maths or text for bundled prompts (default: prompts.jsonl "
    "in the target's folder, else the bundled questions for a chat model and beginnings of texts for others)"
)
BUNDLED_PROMPTS = "bundled"  # value in results if bundled prompts were used, because the target has none of its own
MOST_SEED = 2**32 - 1  # the limit of Transformers and NumPy

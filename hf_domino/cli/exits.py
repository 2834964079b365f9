"""Exit codes of `hf-domino`."""

FAILED_CHECK, USER_ERROR, INTERRUPTED = 1, 2, 130

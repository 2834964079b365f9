"""Exit codes of `hf-domino`."""

FAILED_CHECK, USER_ERROR, INTERRUPTED, TERMINATED = 1, 2, 130, 143

"""Exit codes of `hf-domino`."""

FAILED_CHECK, USER_ERROR, UNDECIDED, INTERRUPTED = 1, 2, 3, 130
BY_SIGNAL = 128  # and the number of the signal that ended a command, as shells have it

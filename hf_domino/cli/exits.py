"""Exit codes of `hf-domino`."""

FAILED_CHECK = 1
USER_ERROR = 2
UNDECIDED = 3
INTERRUPTED = 130
BY_SIGNAL = 128  # plus the number of the signal that ended the command, as in shells

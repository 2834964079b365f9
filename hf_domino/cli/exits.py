"""Exit codes of `hf-domino`."""

FAILED_CHECK = 1
USER_ERROR = 2
UNDECIDED = 3
INTERRUPTED = 130
BY_SIGNAL = 128  # add the number of the signal that ended the command, as shells do

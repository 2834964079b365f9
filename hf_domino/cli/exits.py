"""Exit codes of `hf-domino`."""

FAILED_CHECK = 1
USER_ERROR = 2
UNDECIDED = 3
INTERRUPTED = 130
READER_GONE = 141  # as of a program that SIGPIPE ends
BY_SIGNAL = 128  # add the number of the signal that ended the command, as shells do

"""The loss of a drafter: `eager.py` is the formula, and `chunked.py` computes the same in less memory."""

"""Import before any model class: lets Triton's kernels run on a CPU, in Python, where there is no GPU.

Triton decides that for the whole process when it is first imported, and Transformers' model classes import it.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""One table of all methods with small arguments: tests that every method must pass are parametrised over it.

A new method adds a row here, and is then tested everywhere. `tests/methods/test_method_table.py` notices a missing row.
"""

from __future__ import annotations

METHODS = {
    "domino": {},
    "dflash": {"projector_type": "dflash"},
    "dspark": {"projector_type": "dspark", "markov_rank": 8},
    "dflash2": {
        "projector_type": "dflash2",
        "selector_rank": 8,
        "selector_top_k": 8,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
    },
    "dfly": {"projector_type": "dfly"},
    "xpress": {"projector_type": "xpress", "xpress_rank": 8},
    "eagle3": {"projector_type": "eagle3"},
}
# Forms of these methods that have code of their own.
FORMS = {
    "domino behind the anchor": {"shift_label": False},
    "dspark, gated": METHODS["dspark"] | {"markov_head_type": "gated"},
    "dspark, rnn": METHODS["dspark"] | {"markov_head_type": "rnn"},
}
EVERY = METHODS | FORMS
RECYCLING = "recycling"  # a method without weights, which `hf_domino.recycling(target)` makes

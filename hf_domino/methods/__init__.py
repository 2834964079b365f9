"""The kinds of drafters, a module each: what is known of one, its weights, and how it drafts.

Facts are class attributes, which `config.kind` tells; `drafter.kind` is an instance, which drafts by its weights.
"""

from __future__ import annotations

from hf_domino.methods.block import DFlash
from hf_domino.methods.dflash2 import DFlash2
from hf_domino.methods.domino import Domino
from hf_domino.methods.dspark import DSpark
from hf_domino.methods.eagle3 import Eagle3
from hf_domino.methods.kind import KINDS
from hf_domino.methods.recycling import Recycling

KINDS |= {
    "domino": Domino,
    "dflash": DFlash,
    "dspark": DSpark,
    "dflash2": DFlash2,
    "eagle3": Eagle3,
    "recycling": Recycling,
}

__all__ = ["KINDS"]

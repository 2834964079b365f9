"""The kinds there are, by `projector_type`, as `configuration.kinds` has their facts."""

from __future__ import annotations

from hf_domino.drafter.kinds.domino import BlockKind
from hf_domino.drafter.kinds.eagle3 import Eagle3Kind
from hf_domino.drafter.kinds.kind import Kind
from hf_domino.drafter.kinds.lookahead import LookaheadKind
from hf_domino.drafter.kinds.medusa import MedusaKind
from hf_domino.drafter.kinds.recycling import RecyclingKind

KINDS: dict[str, type[Kind]] = {
    "domino": BlockKind,
    "dflash": BlockKind,
    "medusa": MedusaKind,
    "eagle3": Eagle3Kind,
    "recycling": RecyclingKind,
    "lookahead": LookaheadKind,
}

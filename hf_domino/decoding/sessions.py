"""Which session drafts for a kind."""

from __future__ import annotations

from typing import Any

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.lookahead import LookaheadSession
from hf_domino.decoding.recycling import RecyclingSession
from hf_domino.drafter.modeling import DominoDraftModel

# Of kinds that read no hidden states; all others share one.
SESSIONS: dict[str, type[DraftSession]] = {"recycling": RecyclingSession, "lookahead": LookaheadSession}


def session_of(drafter: DominoDraftModel, *args: Any) -> DraftSession:
    """Begin to draft with this drafter; other arguments are those of [`DraftSession`]."""
    return SESSIONS.get(drafter.config.projector_type, DraftSession)(drafter, *args)

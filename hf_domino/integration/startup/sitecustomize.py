"""What a Python that `hf-domino run` starts imports first: there the drafter waits for its target."""

import logging
import os
import sys
from contextlib import suppress

from hf_domino.integration.default_drafter import await_target


def meet(target: object) -> None:
    """Attach the drafter to its target; the import takes seconds, and not every Python generates."""
    from hf_domino.integration.assisted_call import meet

    meet(target, os.environ["HF_DOMINO_DRAFTER"])


await_target(meet)
logger = logging.getLogger("hf_domino")
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("hf_domino: %(message)s"))
logger.addHandler(handler)
logger.setLevel(os.environ["HF_DOMINO_LEVEL"])
logger.propagate = False

# The module of this name that Python would have imported without us.
sys.path.remove(os.path.dirname(__file__))
own = sys.modules.pop(__name__)
with suppress(ImportError):
    import sitecustomize  # noqa: F401
sys.modules.setdefault(__name__, own)

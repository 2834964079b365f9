"""The first module that a Python process of `hf-domino run` imports; it lets the drafter wait for its target."""

import logging
import os
import sys
from contextlib import suppress

from hf_domino.integration.default_drafter import await_target


def meet(target: object) -> None:
    """Attach the drafter to its target; the import is late because it takes seconds and not every process generates."""
    from hf_domino.integration.assisted_call import meet

    meet(target, os.environ["HF_DOMINO_DRAFTER"], os.environ.get("HF_DOMINO_MEMORY"))


await_target(meet)
logger = logging.getLogger("hf_domino")
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("hf_domino: %(message)s"))
logger.addHandler(handler)
logger.setLevel(os.environ["HF_DOMINO_LEVEL"])
logger.propagate = False

# Import the module of this name that Python would have imported without us.
sys.path.remove(os.path.dirname(__file__))
own = sys.modules.pop(__name__)
with suppress(ImportError):
    import sitecustomize  # noqa: F401
sys.modules.setdefault(__name__, own)

"""Make our own models, studies and figures again: `python model_cards/workshop COMMAND`, in a checkout.

Nobody needs it for a drafter of their own: that is `hf-domino train`, `bench` and `push`.
"""

from __future__ import annotations

import sys

from commands import main

if __name__ == "__main__":
    sys.exit(main())

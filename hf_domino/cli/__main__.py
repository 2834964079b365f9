"""Let `python -m hf_domino.cli` do the same as `hf-domino`."""

import sys

from hf_domino.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

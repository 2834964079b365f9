"""Text to train on: records read and encoded, rows of token ids, and text that the target writes itself."""

from typing import TYPE_CHECKING

from hf_domino.late import late

if TYPE_CHECKING:
    from hf_domino.data.counts import RowCounts
    from hf_domino.data.on_policy import generate_on_policy
    from hf_domino.data.rows import RowDataset, load_rows

__all__ = ["RowCounts", "RowDataset", "generate_on_policy", "load_rows"]

# Public name -> module it is loaded from.
_LATER = {
    "RowCounts": "counts",
    "RowDataset": "rows",
    "load_rows": "rows",
    "generate_on_policy": "on_policy",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = late(__name__, _LATER)

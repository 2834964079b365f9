"""Training text: read and encode records, hold the examples, and let the target write text itself."""

from typing import TYPE_CHECKING

from hf_domino._common.late import late

if TYPE_CHECKING:
    from hf_domino.data.row_counts import RowCounts
    from hf_domino.data.rows import RowDataset, load_rows
    from hf_domino.data.settings import WritingSettings
    from hf_domino.data.token_counts import count_tokens, most_frequent
    from hf_domino.data.writers import EndpointWriter, TargetWriter
    from hf_domino.data.writing import write_data

# Public name -> module from which it is loaded.
_LATER = {
    "RowCounts": "row_counts",
    "RowDataset": "rows",
    "load_rows": "rows",
    "count_tokens": "token_counts",
    "most_frequent": "token_counts",
    "write_data": "writing",
    "WritingSettings": "settings",
    "TargetWriter": "writers",
    "EndpointWriter": "writers",
}
__all__ = [
    "EndpointWriter",
    "RowCounts",
    "RowDataset",
    "TargetWriter",
    "WritingSettings",
    "count_tokens",
    "load_rows",
    "most_frequent",
    "write_data",
]
if not TYPE_CHECKING:
    __getattr__, __dir__ = late(__name__, _LATER)

"""Text to train on: records read and encoded, rows of token ids, and text that the target writes itself."""

from typing import TYPE_CHECKING

from hf_domino._common.late import late

if TYPE_CHECKING:
    from hf_domino.data.counts import RowCounts
    from hf_domino.data.endpoint import EndpointWriter
    from hf_domino.data.frequencies import count_tokens, most_frequent
    from hf_domino.data.on_policy import generate_on_policy
    from hf_domino.data.rows import RowDataset, load_rows
    from hf_domino.data.settings import WritingSettings
    from hf_domino.data.writers import TargetWriter
    from hf_domino.data.writing import write_data

__all__ = [
    "EndpointWriter",
    "RowCounts",
    "RowDataset",
    "TargetWriter",
    "WritingSettings",
    "count_tokens",
    "generate_on_policy",
    "load_rows",
    "most_frequent",
    "write_data",
]

# Public name -> module it is loaded from.
_LATER = {
    "RowCounts": "counts",
    "RowDataset": "rows",
    "load_rows": "rows",
    "count_tokens": "frequencies",
    "most_frequent": "frequencies",
    "generate_on_policy": "on_policy",
    "write_data": "writing",
    "WritingSettings": "settings",
    "TargetWriter": "writers",
    "EndpointWriter": "endpoint",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = late(__name__, _LATER)

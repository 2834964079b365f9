"""Text that a target wrote, as Parquet files of token ids, which take a tenth of the room of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from datasets import Features, Value, load_dataset
from datasets import Sequence as Items
from pyarrow.parquet import write_table

from hf_domino._common.atomic_writes import atomic_write


def join_rows(files: Sequence[Path], output: Path, keep_messages: bool) -> Path:
    """Put the rows of several files of `hf-domino data` into one, with or without the texts in readable form."""
    rows = load_dataset("json", data_files=list(map(str, files)), split="train")
    kinds = {"input_ids": Items(Value("int32")), "loss_mask": Items(Value("int8"))}
    kept = (*kinds, "temperature", *(["messages"] if keep_messages else []))
    rows = rows.select_columns(list(kept)).cast(Features(rows.select_columns(list(kept)).features | kinds))
    output.parent.mkdir(exist_ok=True)
    with atomic_write(output) as temporary:
        write_table(
            rows.with_format("arrow")[:], temporary, compression="zstd", compression_level=19, use_dictionary=False
        )
    return output

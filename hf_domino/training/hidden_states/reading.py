"""Hidden states are read: rows that carry theirs.

Shapes: S sequence length, C hidden states kept per token, H hidden size.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from hf_domino._common.refusal import refusal
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.data.rows import RowCounts
from hf_domino.training.hidden_states.folder import INDEX_FILE, StateSettings, find_rows
from hf_domino.training.objective.forward import STATES


class CachedRows(Dataset):
    """Rows that carry the target's hidden states, read from a folder when a row is asked for.

    Args:
        rows (`Sequence[dict]`): Each with `input_ids` and `loss_mask`.
        folder (`str` or `Path`): Where [`StateWriter`] wrote them.
        target (`PreTrainedModel`): The target.
        config (`DominoConfig`): Of the drafter that is to read them.
        final (`bool`, *optional*, defaults to `False`): Whether the state that lm_head reads is needed.

    Raises:
        ValueError: If the folder is of another target or of other layers, or lacks a row.
    """

    def __init__(
        self,
        rows: Any,
        folder: str | Path,
        target: PreTrainedModel,
        config: DominoConfig,
        final: bool = False,
    ):
        settings = StateSettings.load(Path(folder))
        if settings is None:
            raise refusal(str(folder), "a folder of hidden states", f"one without {INDEX_FILE}", "Write them first.")
        self.rows = rows
        self.folder = Path(folder)
        self.settings = settings
        self.counts = getattr(rows, "counts", RowCounts())
        known = find_rows(self.folder)
        settings.check_serves(self.folder, config, final, target)
        keys = [key for key, _ in keys_of(rows)]
        if missing := [index for index, key in enumerate(keys) if key not in known]:
            remedy = "Let StateWriter(...).write(rows) add what is missing; hf-domino train does so."
            value = f"one without row {missing[0]} ({len(missing)} of {len(rows)} are missing)"
            raise refusal(str(folder), "a folder of hidden states of all rows", value, remedy)
        self._places = [known[key] for key in keys]
        self._open: dict[Path, Any] = {}  # memory-mapped shards

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # maps of files are opened anew in each process

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index` with `hidden_states` `[S, C, H]`."""
        shard, start, end = self._places[index]
        if shard not in self._open:
            self._open[shard] = safe_open(shard, framework="pt").get_slice("hidden_states")
        return self.rows[index] | {STATES: self._open[shard][start:end]}


def keys_of(rows: Any) -> list[tuple[int, int]]:
    """Key and length of each row; the key, by which it is found, is 64 bits of a digest of its token ids."""
    if hasattr(rows, "token_batches"):  # whole columns at once, of rows that lie on disk
        texts = (ids for flat, lengths in rows.token_batches() for ids in np.split(flat, lengths.cumsum()[:-1]))
    else:
        texts = (rows[index]["input_ids"] for index in range(len(rows)))
    found = []
    for text in texts:
        digest = hashlib.blake2b(np.asarray(text, dtype=np.int64).tobytes(), digest_size=8).digest()
        found.append((int.from_bytes(digest, "little", signed=True), len(text)))
    return found

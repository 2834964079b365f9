"""A folder of hidden states: what it was made with, and rows that read theirs from its shards, by their token ids.

A row is known by a digest of its token ids, so one folder serves training and evaluation rows in any order, and what
it lacks can be added. A shard is there whole or not at all: a process may die anywhere.

Shapes: S tokens of a row, C hidden states kept per token (captured layers, then the final one), H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from hf_domino._common.atomic_writes import atomic_write
from hf_domino._common.dtypes import dtype_of
from hf_domino._common.errors import invalid_argument
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.data.rows import RowCounts
from hf_domino.target.identity import TargetIdentity, check_same, identify
from hf_domino.training.objective.forward import STATES

INDEX_FILE = "index.json"
SHARDS = "states-*.safetensors"
DELETE_SHARD = "Delete this file and run the same command again, which writes only its examples again."
START_AGAIN = "Delete {folder}, so that the states are written again, or choose another (--cache-hidden-states)."


@dataclass(frozen=True)
class StateSettings:
    """What hidden states were made with."""

    target: TargetIdentity
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    final: bool = False  # whether the state that lm_head reads is kept too

    @property
    def num_states(self) -> int:
        """Hidden states per token (C)."""
        return len(self.layer_ids) + self.final

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token on disk."""
        return self.num_states * self.hidden_size * dtype_of(self.dtype).itemsize

    @classmethod
    def load(cls, folder: Path) -> StateSettings | None:
        """Those of a folder; None where it has none."""
        path = folder / INDEX_FILE
        if not path.is_file():
            return None
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            values.pop("target_files", None)  # of older folders
            target = TargetIdentity.from_dict(values.pop("target")) or TargetIdentity()
            return cls(target=target, layer_ids=tuple(values.pop("layer_ids")), **values)
        except (ValueError, KeyError, TypeError) as error:
            remedy = START_AGAIN.format(folder=folder)
            raise invalid_argument(str(path), "the index of hidden states", str(error), remedy) from error

    def check_serves(self, folder: Path, config: DominoConfig, final: bool, target: PreTrainedModel) -> None:
        """Refuse a folder with these settings for what a drafter reads of a target."""
        remedy = START_AGAIN.format(folder=folder)
        layer_ids = tuple(config.target_layer_ids or ())
        check_same(self.target, identify(target), str(folder), remedy)
        if self.layer_ids != layer_ids:
            made = f"{list(self.layer_ids)}, those of the states in {folder}"
            raise invalid_argument("the drafter's target_layer_ids", made, list(layer_ids), remedy)
        if final and not self.final:
            raise invalid_argument(
                f"the states in {folder}", "written with final=True for distillation", "without", remedy
            )


def find_rows(folder: Path) -> dict[int, tuple[Path, int, int]]:
    """Shard, first token and end of the rows in a folder, by their keys."""
    found: dict[int, tuple[Path, int, int]] = {}
    for shard in sorted(folder.glob(SHARDS), reverse=True):
        try:
            with safe_open(shard, framework="np") as file:
                keys, ends = (file.get_tensor(name).tolist() for name in ("keys", "ends"))
        except (SafetensorError, OSError) as error:
            raise invalid_argument(str(shard), "a shard of hidden states", str(error), DELETE_SHARD) from error
        found |= {key: (shard, *span) for key, span in zip(keys, pairwise((0, *ends)), strict=True)}
    return found


def write_shard(folder: Path, rows: dict[int, torch.Tensor]) -> None:
    """Write rows `[S, C, H]` on the CPU by their keys, whole or not at all."""
    keys = torch.tensor(list(rows), dtype=torch.int64)
    tensors = {
        "hidden_states": torch.cat(list(rows.values())),
        "keys": keys,
        "ends": torch.tensor([len(states) for states in rows.values()]).cumsum(0),
    }
    name = f"states-{hashlib.sha256(keys.numpy().tobytes()).hexdigest()[:16]}.safetensors"
    with atomic_write(folder / name) as aside:
        save_file(tensors, aside)


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
            raise invalid_argument(
                str(folder), "a folder of hidden states", f"one without {INDEX_FILE}", "Write them first."
            )
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
            raise invalid_argument(str(folder), "a folder of hidden states of all rows", value, remedy)
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

"""A folder of hidden states: what it was made with, and the rows in its shards, found by their token ids.

A row is known by a digest of its token ids, so one folder serves training and evaluation rows in any order, and what
it lacks can be added. A shard is there whole or not at all: a process may die anywhere.

Shapes: R rows, S tokens of a row, N rows that are looked for, C hidden states kept per token (captured layers, then the
final one), H hidden size.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_domino._common.dtypes import dtype_of
from hf_domino._common.refusal import refusal
from hf_domino._common.whole_files import whole_file
from hf_domino.configuration import DominoConfig
from hf_domino.target.identity import TargetIdentity, check_same, identify

INDEX_FILE, SHARDS = "index.json", "states-*.safetensors"
DELETE_SHARD = "Delete this file and run the same command again: its rows are written again, and no others."
START_AGAIN = "Delete {folder} and the states are written again, or choose another folder (--cache-hidden-states)."


@dataclass(frozen=True)
class StateSettings:
    """What hidden states were made with; `target_files` is a digest where the target was loaded from them unchanged."""

    target: TargetIdentity
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    final: bool = False  # whether the state that lm_head reads is kept too
    target_files: str | None = None

    @classmethod
    def of(
        cls, target: PreTrainedModel, config: DominoConfig, dtype: str, final: bool, target_files: str | None = None
    ) -> StateSettings:
        """Settings for a target and the configuration of a drafter; the dtype `"auto"` is the target's own."""
        known = dtype_of(target.dtype if dtype == "auto" else dtype, "cache_dtype", "Choose one of them, or auto.")
        layer_ids = tuple(config.target_layer_ids or ())
        name = str(known).removeprefix("torch.")
        return cls(identify(target), layer_ids, config.hidden_size, name, final, target_files)

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
            target = TargetIdentity.from_dict(values.pop("target")) or TargetIdentity()
            return cls(target=target, layer_ids=tuple(values.pop("layer_ids")), **values)
        except (ValueError, KeyError, TypeError) as error:
            remedy = START_AGAIN.format(folder=folder)
            raise refusal(str(path), "the index of hidden states", str(error), remedy) from error

    def check_serves(self, wanted: StateSettings, folder: Path) -> None:
        """Refuse a folder with these settings for those that are wanted; in what it is stored does not matter."""
        remedy = START_AGAIN.format(folder=folder)
        check_same(self.target, wanted.target, str(folder), remedy)
        if self.layer_ids != wanted.layer_ids:
            made = f"{list(self.layer_ids)}, those of the states in {folder}"
            raise refusal("the drafter's target_layer_ids", made, list(wanted.layer_ids), remedy)
        if wanted.final and not self.final:
            raise refusal(f"the states in {folder}", "with the final one, which distillation reads", "without", remedy)


class StateFolder:
    """Hidden states in a folder with an index, memory-mapped; the processes of a data loader may share it."""

    def __init__(self, path: Path):
        settings = StateSettings.load(path)
        if settings is None:
            raise refusal(str(path), "a folder of hidden states", f"one without {INDEX_FILE}", "Write them first.")
        self.path, self.settings = path, settings
        self._shards = sorted(path.glob(SHARDS))
        self._slices: dict[int, Any] = {}
        last = np.array([[np.iinfo(np.int64).max, -1, -1, -1, -1]])
        rows = np.concatenate([*(_rows_of(shard, number) for number, shard in enumerate(self._shards)), last])
        self._rows = rows[np.argsort(rows[:, 0], kind="stable")]  # [R, 5], by key

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_slices": {}}  # maps of files are opened anew in each process

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Shard, first token, end and checksum of rows by their keys, `[N, 4]`; -1 for no such row."""
        rows = self._rows[np.searchsorted(self._rows[:, 0], keys)]
        return np.where(rows[:, :1] == keys[:, None], rows[:, 1:], -1)

    def read(self, shard: int, start: int, end: int, expected: int | None = None) -> torch.Tensor:
        """Hidden states `[S, C, H]` of a row, from the disk or its cache; with another checksum they are refused."""
        path = self._shards[shard]
        if shard not in self._slices:
            self._slices[shard] = safe_open(path, framework="pt").get_slice("hidden_states")
        states = self._slices[shard][start:end]
        if expected is not None and (found := checksum(states)) != expected:
            field = f"{path}: the checksum of tokens {start} to {end}"
            raise refusal(field, f"{expected}, as it was when they were written", found, DELETE_SHARD)
        return states


def checksum(states: torch.Tensor) -> int:
    """CRC-32 of the bytes of a row's hidden states `[S, C, H]` on the CPU."""
    return zlib.crc32(states.contiguous().view(torch.uint8).numpy().data)


def _rows_of(shard: Path, number: int) -> np.ndarray:
    """Key, shard, start, end and checksum of the rows of a shard, `[R, 5]` int64."""
    try:
        with safe_open(shard, framework="np") as file:
            keys, ends, checksums = (file.get_tensor(name) for name in ("keys", "ends", "checksums"))
    except (SafetensorError, OSError) as error:
        raise refusal(str(shard), "a shard of hidden states", str(error), DELETE_SHARD) from error
    return np.stack([keys, np.full_like(keys, number), np.append(0, ends)[:-1], ends, checksums], axis=1)


def write_shard(folder: Path, rows: dict[int, torch.Tensor]) -> None:
    """Write rows `[S, C, H]` on the CPU by their keys, whole or not at all."""
    keys = torch.tensor(list(rows), dtype=torch.int64)
    tensors = {
        "hidden_states": torch.cat(list(rows.values())),
        "keys": keys,
        "ends": torch.tensor([len(states) for states in rows.values()]).cumsum(0),
        "checksums": torch.tensor([checksum(states) for states in rows.values()]),
    }
    name = f"states-{hashlib.sha256(keys.numpy().tobytes()).hexdigest()[:16]}.safetensors"
    with whole_file(folder / name) as aside:
        save_file(tensors, aside)

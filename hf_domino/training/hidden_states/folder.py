"""A folder of hidden states: what it was made with, and the rows in its shards, found by their token ids.

A row is known by a digest of its token ids, so one folder serves training and evaluation rows in any order, and what
it lacks can be added. A shard is written aside and gets its name when it is whole: a process may die anywhere.

Shapes: T tokens of a shard, R rows of a shard, C hidden states kept per token (captured layers, then the final one),
H hidden size.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_domino._common.dtypes import dtype_of
from hf_domino._common.refusal import refusal
from hf_domino._common.whole_files import MAKE_ROOM, needing_room, write_whole
from hf_domino.configuration import DominoConfig
from hf_domino.target.identity import TargetIdentity, check_same, identify

INDEX_FILE, LOCK_FILE, SHARD_PATTERN = "index.json", "index.lock", "states-*.safetensors"
MAX_SECONDS = 60.0  # of collecting rows for a shard: what a process that dies loses
PARTIAL_LIFE = 3600.0  # seconds without a byte written after which whoever wrote a shard is dead
NO_CHECKSUM = -1
DELETE_SHARD = "Delete this file and run the same command again: its rows are written again, and no others."
START_AGAIN = "Delete {folder} and the states are written again, or choose another folder (--cache-hidden-states)."


@dataclass(frozen=True)
class StateSettings:
    """What hidden states were made with.

    Args:
        target (`TargetIdentity`): Whose they are.
        layer_ids (`tuple[int, ...]`): The captured layers, in the drafter's order.
        hidden_size (`int`): Of the target.
        dtype (`str`): What they are stored in.
        final (`bool`, *optional*, defaults to `False`): Whether the state that lm_head reads is kept too.
        target_files (`str`, *optional*): Digest of the target's files, where it was loaded from them unchanged.
    """

    target: TargetIdentity
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    final: bool = False
    target_files: str | None = None

    @classmethod
    def of(
        cls,
        target: PreTrainedModel,
        config: DominoConfig,
        dtype: str = "auto",
        final: bool = False,
        target_files: str | None = None,
    ) -> StateSettings:
        """Settings for a target and the configuration of a drafter; the dtype `"auto"` is the target's own.

        Raises:
            ValueError: If states cannot be stored in `dtype`.
        """
        known = dtype_of(target.dtype if dtype == "auto" else dtype, "cache_dtype", "Choose one of them, or auto.")
        name = str(known).removeprefix("torch.")
        layer_ids = tuple(config.target_layer_ids or ())
        return cls(identify(target), layer_ids, config.hidden_size, name, final, target_files)

    @property
    def num_states(self) -> int:
        """Hidden states per token (C)."""
        return len(self.layer_ids) + self.final

    @property
    def bytes_per_token(self) -> int:
        """What a token takes on disk."""
        return self.num_states * self.hidden_size * dtype_of(self.dtype).itemsize

    @classmethod
    def load(cls, folder: Path) -> StateSettings | None:
        """Those of a folder; None where it has none.

        Raises:
            ValueError: If its index cannot be read.
        """
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
        """Refuse a folder with these settings for those that are wanted; in what it is stored does not matter.

        Raises:
            ValueError: If target or layers differ, or the final state is wanted and not there.
        """
        remedy = START_AGAIN.format(folder=folder)
        if None in (self.target_files, wanted.target_files) or self.target_files != wanted.target_files:
            check_same(self.target, wanted.target, str(folder), remedy)
        if self.layer_ids != wanted.layer_ids:
            made = f"{list(self.layer_ids)}, those of the states in {folder}"
            raise refusal("the drafter's target_layer_ids", made, list(wanted.layer_ids), remedy)
        if wanted.final and not self.final:
            raise refusal(f"the states in {folder}", "with the final one, which distillation reads", "without", remedy)


class Found(NamedTuple):
    """Where rows are: number of the shard, first token and end in it, each `[N]` int64; shard -1 for no such row.

    `checksums` are those of [`checksum`], `NO_CHECKSUM` where none was written.
    """

    shards: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    checksums: np.ndarray


def row_key(input_ids: Sequence[int] | np.ndarray) -> int:
    """What a row is found by: 64 bits of a digest of its token ids."""
    digest = hashlib.blake2b(np.asarray(input_ids, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def checksum(states: torch.Tensor) -> int:
    """CRC-32 of the bytes of a row's hidden states `[S, C, H]` on the CPU."""
    return zlib.crc32(states.contiguous().view(torch.uint8).numpy().data)


class StateFolder:
    """Hidden states in a folder, memory-mapped; the processes of a data loader may share it.

    Args:
        path (`Path`): The folder; it must have an index.

    Raises:
        ValueError: If there is no index, or a shard cannot be read.
    """

    def __init__(self, path: Path):
        settings = StateSettings.load(path)
        if settings is None:
            raise refusal(str(path), "a folder of hidden states", f"one without {INDEX_FILE}", "Write them first.")
        self.path, self.settings = path, settings
        self._shards = sorted(path.glob(SHARD_PATTERN))
        self._slices: dict[int, Any] = {}
        parts = [_rows_of(shard) for shard in self._shards]
        empty = np.empty(0, np.int64)
        keys, starts, ends, checksums = (np.concatenate(columns) for columns in zip(*parts, [empty] * 4, strict=True))
        order = np.argsort(keys, kind="stable")
        shards = np.repeat(np.arange(len(parts)), [len(keys) for keys, *_ in parts])
        self._keys = keys[order]
        self._rows = Found(*(column[order] for column in (shards, starts, ends, checksums)))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_slices": {}}  # maps of files are opened anew in each process

    def find(self, keys: np.ndarray) -> Found:
        """Look rows up by their keys `[N]`."""
        if not len(self._keys):
            return Found(*(np.full(len(keys), -1) for _ in Found._fields))
        at = np.searchsorted(self._keys, keys).clip(max=len(self._keys) - 1)
        shards, *places = (column[at] for column in self._rows)
        return Found(np.where(self._keys[at] == keys, shards, -1), *places)

    def read(self, shard: int, start: int, end: int, expected: int = NO_CHECKSUM) -> torch.Tensor:
        """Hidden states `[end - start, C, H]` of some tokens of a shard, from the disk or its cache.

        Args:
            shard, start, end (`int`): Where a row is, from [`~StateFolder.find`].
            expected (`int`, *optional*): Its checksum. Defaults to none, and the row is not checked.

        Raises:
            ValueError: If it has another checksum.
        """
        path = self._shards[shard]
        if shard not in self._slices:
            self._slices[shard] = safe_open(path, framework="pt").get_slice("hidden_states")
        states = self._slices[shard][start:end]
        if expected != NO_CHECKSUM and (found := checksum(states)) != expected:
            field = f"{path}: the checksum of tokens {start} to {end}"
            raise refusal(field, f"{expected}, as it was when they were written", found, DELETE_SHARD)
        return states


def _rows_of(shard: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys, starts, ends and checksums of the rows of a shard, `[R]` each."""
    try:
        with safe_open(shard, framework="np") as file:
            keys, ends = file.get_tensor("keys"), file.get_tensor("ends")
            has_checksums = "checksums" in file.keys()  # noqa: SIM118, a file is no mapping
            checksums = file.get_tensor("checksums") if has_checksums else np.full_like(keys, NO_CHECKSUM)
            return keys, np.append(0, ends)[:-1], ends, checksums
    except (SafetensorError, OSError) as error:
        raise refusal(str(shard), "a shard of hidden states", str(error), DELETE_SHARD) from error


class ShardWriter:
    """Collects rows, and writes them as shards of a folder.

    Args:
        folder (`Path`): The folder.
        settings (`StateSettings`): Of the folder.
        max_bytes (`int`): Largest shard; it is collected in memory, for `MAX_SECONDS` at most.
    """

    def __init__(self, folder: Path, settings: StateSettings, max_bytes: int):
        self.folder, self.settings = folder, settings
        self._max_tokens = max(1, max_bytes // settings.bytes_per_token)
        self._rows: dict[int, torch.Tensor] = {}
        self._num_tokens, self._since = 0, time.monotonic()

    def add(self, rows: dict[int, torch.Tensor]) -> None:
        """Take rows that stay together, by their keys, each `[S, C, H]` on the CPU."""
        num_tokens = sum(map(len, rows.values()))
        if self._num_tokens and self._num_tokens + num_tokens > self._max_tokens:
            self.flush()
        self._rows |= rows
        self._num_tokens += num_tokens
        if time.monotonic() - self._since >= MAX_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what was collected, whole or not at all."""
        if not self._rows:
            return
        keys = torch.tensor(list(self._rows), dtype=torch.int64)
        checksums = torch.tensor([checksum(states) for states in self._rows.values()])
        ends = torch.tensor([len(states) for states in self._rows.values()]).cumsum(0)
        name = f"states-{hashlib.sha256(keys.numpy().tobytes()).hexdigest()[:16]}.safetensors"
        aside = self.folder / f"{name}.partial-{uuid.uuid4().hex[:12]}"  # another run may write the same rows
        states = torch.cat(list(self._rows.values()))
        try:
            with needing_room(self.folder / name, MAKE_ROOM, states.nbytes):
                save_file({"hidden_states": states, "keys": keys, "ends": ends, "checksums": checksums}, aside)
                with aside.open("rb+") as file:
                    os.fsync(file.fileno())
                os.replace(aside, self.folder / name)
        except OSError:
            aside.unlink(missing_ok=True)  # it takes room that is wanted
            raise
        self._rows, self._num_tokens, self._since = {}, 0, time.monotonic()


def begin(folder: Path, wanted: StateSettings) -> StateSettings:
    """Make a folder ready to be written to, or to be gone on with.

    Args:
        folder (`Path`): It need not exist.
        wanted (`StateSettings`): With which states are to be written.

    Returns:
        `StateSettings`: Those to write with.

    Raises:
        ValueError: If the folder was begun with others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _delete_old_partials(folder)
    with FileLock(folder / LOCK_FILE):  # of runs that begin it at once, one does
        found = StateSettings.load(folder)
        if found is None:
            write_whole(folder / INDEX_FILE, json.dumps(asdict(wanted), indent=2) + "\n")
            return wanted
    found.check_serves(wanted, folder)
    if found.dtype != wanted.dtype:
        made = f"{found.dtype!r}, with which {folder} was begun"
        raise refusal("cache_dtype", made, wanted.dtype, START_AGAIN.format(folder=folder))
    return found


def _delete_old_partials(folder: Path) -> None:
    """Delete what processes that died left; a younger one may be another run's that is just being written."""
    for partial in folder.glob(f"{SHARD_PATTERN}.partial-*"):
        with contextlib.suppress(FileNotFoundError):  # it has just got its name
            if time.time() - partial.stat().st_mtime > PARTIAL_LIFE:
                partial.unlink()

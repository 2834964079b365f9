"""A folder of hidden states: its settings, its shards, and examples that read their states from it.

An example is identified by a digest of its token ids. So one folder serves training and evaluation examples in any
order, and missing examples can be added later. A shard is written completely or not at all, so a process can die at any
time.

Shapes: S tokens of an example, C hidden states kept per token (captured layers, then the final one), H hidden size.
"""

from __future__ import annotations

import copy
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
from hf_domino._common.notices import notice
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.data.row_counts import RowCounts
from hf_domino.targets.identity import TargetIdentity, check_same, identify
from hf_domino.training.objective.forward import STATES

INDEX_FILE = "index.json"
SHARDS = "states-*.safetensors"
DELETE_SHARD = "Delete this file and run the same command again, which writes only its examples again."
NO_FINAL = "Or train with distillation_weight=0, which does not need it (CachedRows(..., final=False))."
START_AGAIN = "Delete {folder}, so that the states are written again, or choose another (--cache-hidden-states)."


@dataclass(frozen=True)
class StateSettings:
    """The settings with which hidden states were computed and stored."""

    target: TargetIdentity
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str
    final: bool = False  # whether the state that lm_head reads is kept, too

    @property
    def num_states(self) -> int:
        """Hidden states per token (C)."""
        return len(self.layer_ids) + self.final

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token on disk."""
        return self.num_states * self.hidden_size * dtype_of(self.dtype).itemsize

    @classmethod
    def load(cls, folder: Path) -> StateSettings | None:
        """Load the settings of a folder; None if it has none."""
        path = folder / INDEX_FILE
        if not path.is_file():
            return None
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            target = TargetIdentity.from_dict(values.pop("target")) or TargetIdentity()
            return cls(target=target, layer_ids=tuple(values.pop("layer_ids")), **values)
        except (ValueError, KeyError, TypeError) as error:
            remedy = START_AGAIN.format(folder=folder)
            raise invalid_argument(str(path), "the index of hidden states", str(error), remedy) from error

    def validate_for(self, folder: Path, config: DominoConfig, final: bool, target: PreTrainedModel) -> None:
        """Raise a `ValueError` if a folder with these settings lacks what a drafter reads of a target."""
        remedy = START_AGAIN.format(folder=folder)
        layer_ids = tuple(config.target_layer_ids or ())
        check_same(self.target, identify(target), str(folder), remedy)
        if self.layer_ids != layer_ids:
            made = f"{list(self.layer_ids)}, those of the states in {folder}"
            raise invalid_argument("the drafter's target_layer_ids", made, list(layer_ids), remedy)
        if final and not self.final:
            raise invalid_argument(
                f"the states in {folder}", "written with final=True for distillation", "without", f"{remedy} {NO_FINAL}"
            )


def find_rows(folder: Path) -> dict[int, tuple[Path, int, int]]:
    """Find the shard, the first token and the end of every example in a folder, by key."""
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
    """Write the states `[S, C, H]` of examples, on the CPU and by key, to a shard, completely or not at all."""
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
    """Examples with the target's hidden states, which are read from a folder when an example is accessed.

    Args:
        rows (`Sequence[dict]`): Examples, each with `input_ids` and `loss_mask`.
        folder (`str` or `Path`): Folder to which [`StateWriter`] wrote the states.
        target (`PreTrainedModel`): The target.
        config (`DominoConfig`): Configuration of the drafter that will read the states.
        final (`bool`, *optional*, defaults to `True`): Whether the state that lm_head reads is needed, too: it is for
            distillation, unless `distillation_weight` is 0.

    Raises:
        ValueError: If the folder belongs to another target or to other layers, or lacks an example.
    """

    def __init__(
        self,
        rows: Any,
        folder: str | Path,
        target: PreTrainedModel,
        config: DominoConfig,
        final: bool = True,
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
        self.dataset_name = getattr(rows, "dataset_name", None)
        known = find_rows(self.folder)
        settings.validate_for(self.folder, config, final, target)
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
        return self.__dict__ | {"_open": {}}  # each process opens its own memory maps

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return example `index` with its `hidden_states` `[S, C, H]`."""
        shard, start, end = self._places[index]
        if shard not in self._open:
            self._open[shard] = safe_open(shard, framework="pt").get_slice("hidden_states")
        row = self.rows[index]
        cut = {name: row[name][: end - start] for name in ("input_ids", "loss_mask")}
        return cut | {STATES: self._open[shard][start:end]}

    def within(self, max_length: int, vocab_size: int | None = None, name: str = "rows") -> CachedRows:
        """Return the examples cut at `max_length`, as [`RowDataset.within`] does; their ids are the target's own.

        The states of the tokens that stay are the same, because the target is causal.
        """
        num_cut = sum(end - start > max_length for _, start, end in self._places)
        if not num_cut:
            return self
        notice(f"{name}: {num_cut} of {len(self)} rows are cut at max_length.")
        result = copy.copy(self)
        result._places = [(shard, start, min(end, start + max_length)) for shard, start, end in self._places]
        result._open = {}
        return result


def keys_of(rows: Any) -> list[tuple[int, int]]:
    """Return the key and the length of each example; the key is a 64-bit digest of its token ids."""
    if hasattr(rows, "token_batches"):  # examples that are stored on disk are read many at once
        texts = (ids for flat, lengths in rows.token_batches() for ids in np.split(flat, lengths.cumsum()[:-1]))
    else:
        texts = (rows[index]["input_ids"] for index in range(len(rows)))
    found = []
    for text in texts:
        digest = hashlib.blake2b(np.asarray(text, dtype=np.int64).tobytes(), digest_size=8).digest()
        found.append((int.from_bytes(digest, "little", signed=True), len(text)))
    return found

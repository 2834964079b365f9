"""Hidden states are written, by forwards over rows of like length.

Shapes: S sequence length, C hidden states kept per token, H hidden size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_domino._common.dtypes import dtype_of
from hf_domino._common.notices import notice
from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.target.view import TargetModel
from hf_domino.training.hidden_states.folder import StateFolder, StateSettings, begin, write_shard
from hf_domino.training.hidden_states.reading import keys_of
from hf_domino.training.objective.distillation import check_final
from hf_domino.training.objective.forward import read_target

MAX_SHARD_BYTES = 2**27
GB = 1e9
NOT_FINITE = (
    "Store them in a type of wider range (--cache-dtype bfloat16, another folder); if they were not finite before, run "
    "the target in a wider dtype."
)


class StateWriter:
    """Writes what a folder of hidden states lacks.

    Args:
        target (`PreTrainedModel`): The target, in evaluation mode.
        config (`DominoConfig`): Of the drafter that is to read them, for `target_layer_ids`.
        folder (`str` or `Path`): Where; it need not exist. What is there is kept, if it is of this target and layers.
        dtype (`str`, *optional*, defaults to `"bfloat16"`): To store them in: that, `"float16"`, `"float32"`, or
            `"auto"` for the target's own, in which training is the same bit for bit where batches are.
        final (`bool`, *optional*, defaults to `False`): Keep the state that lm_head reads too, for distillation.
        target_files (`str`, *optional*): Digest of the files that the target was loaded from, see `files_digest`.
        autocast (`Callable`, *optional*): Gives the context of the forwards, as training has it.
        shard (`tuple[int, int]`, *optional*, defaults to (0, 1)): This process and the number of processes.
        max_shard_bytes (`int`, *optional*): Largest file. Rows are collected for it in memory, and lost with a process
            that dies.

    Raises:
        ValueError: If the folder was begun with another target, other layers or another dtype.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        config: DominoConfig,
        folder: str | Path,
        dtype: str = "bfloat16",
        final: bool = False,
        target_files: str | None = None,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        shard: tuple[int, int] = (0, 1),
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ):
        self.target, self.folder = TargetModel(target, config), Path(folder)
        self.settings = begin(self.folder, StateSettings.of(target, config, dtype, final, target_files))
        self._autocast, self._shard, self._max_bytes = autocast, shard, max_shard_bytes
        self._final_is_known = not final

    def write(self, rows: Any, tokens_per_forward: int = 8192, progress: bool = True) -> None:
        """Run the target over the rows that are missing, this process's share of them.

        Rows are sorted by length, so that batches hold little padding; a batch is computed whole or not at all, in the
        same company after an interruption as without one.

        Args:
            rows (`Sequence[dict]`): With `input_ids`.
            tokens_per_forward (`int`, *optional*, defaults to 8192): Most tokens of a batch, padding included; at
                least one row.
            progress (`bool`, *optional*, defaults to `True`): Show a progress bar.

        Raises:
            ValueError: If the disk has not enough room for them, or a state is not finite.
        """
        keys, lengths = keys_of(rows)
        first = np.unique(keys, return_index=True)[1]  # of equal rows
        order = first[np.lexsort((keys[first], lengths[first]))]
        is_missing = np.zeros(len(keys), bool)
        is_missing[order] = StateFolder(self.folder).find(keys[order])[:, 0] < 0
        if not is_missing.any():
            return
        self._check_room(int(lengths[is_missing].sum()), f"{is_missing.sum()} of {len(order)} different rows")
        # Which process does a batch depends on nothing that another process may just be writing.
        batches = list(_batches(order, lengths, tokens_per_forward))[self._shard[0] :: self._shard[1]]
        todo = [batch for batch in batches if is_missing[batch].any()]
        total = int(sum(lengths[batch].sum() for batch in todo))
        shard: dict[int, torch.Tensor] = {}
        with tqdm(desc="hidden states", total=total, unit="token", unit_scale=True, disable=not progress) as bar:
            for batch in todo:
                states = self._forward([rows[int(index)]["input_ids"] for index in batch])
                new = {int(keys[index]): row for index, row in zip(batch, states, strict=True) if is_missing[index]}
                num_tokens = sum(map(len, (*shard.values(), *new.values())))
                if shard and num_tokens * self.settings.bytes_per_token > self._max_bytes:
                    write_shard(self.folder, shard)
                    shard = {}
                shard |= new
                bar.update(int(lengths[batch].sum()))
        if shard:
            write_shard(self.folder, shard)

    def _check_room(self, num_tokens: int, name: str) -> None:
        """Say what the tokens of some rows take on the disk, and refuse where it has not enough room."""
        settings, free = self.settings, shutil.disk_usage(self.folder).free
        needed = num_tokens * settings.bytes_per_token
        notice(
            f"hidden states of {name} take {needed / GB:.3g} GB in {self.folder}: {num_tokens} tokens of "
            f"{settings.bytes_per_token} bytes ({settings.num_states} states of {settings.hidden_size} in "
            f"{settings.dtype}); {free / GB:.3g} GB are free."
        )
        if needed > free:
            remedy = "Free some, choose a folder on another disk (--cache-hidden-states), take fewer or shorter rows"
            remedy += "." if dtype_of(settings.dtype).itemsize == 2 else ", or --cache-dtype bfloat16."
            expected = f"at least {needed / GB:.3g} GB, for {num_tokens} tokens"
            raise refusal(f"the room for {self.folder}", expected, f"{free / GB:.3g} GB", remedy)

    def _forward(self, texts: list[Sequence[int]]) -> list[torch.Tensor]:
        """Hidden states `[S, C, H]` on the CPU of each of some rows."""
        ids = [torch.as_tensor(text, dtype=torch.int64) for text in texts]
        # What fills up is never seen: it is on the right, and the target is causal.
        padded = pad_sequence(ids, batch_first=True).to(self.target.input_device)
        with self._autocast():
            read = read_target(self.target, padded, final=self.settings.final)
            if not self._final_is_known and read.final is not None and read.logits is not None:
                check_final(self.target, read.final, read.logits)
                self._final_is_known = True
        parts = (*read.captured, *(() if read.final is None else (read.final,)))
        kept = torch.stack([part.to(dtype_of(self.settings.dtype)) for part in parts], dim=2).cpu()
        states = [row[: len(text)] for row, text in zip(kept, ids, strict=True)]
        if not all(torch.isfinite(row).all() for row in states):  # a training from them would fail far from the cause
            raise refusal(f"hidden states in {self.settings.dtype}", "finite", "inf or nan", NOT_FINITE)
        return states


def _batches(order: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Cut rows, the shortest first, into batches of at most so many tokens once they are padded."""
    start = 0
    for end, index in enumerate(order):
        if end > start and (end - start + 1) * lengths[index] > tokens:
            yield order[start:end]
            start = end
    yield order[start:]

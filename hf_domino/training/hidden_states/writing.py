"""Hidden states are written: by forwards over rows of like length, or while the target generates the rows.

Generation sees every token of a row but the last one, whose states no block ever reads; they are zeros then. Its
forwards over single tokens round otherwise than one over the whole row, so losses from such states differ by up to
`GENERATED_TOL`.

Shapes: B batch, S sequence length, C hidden states kept per token, H hidden size.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_domino._common.dtypes import dtype_of
from hf_domino._common.notices import notice
from hf_domino._common.refusal import refusal
from hf_domino.configuration import DominoConfig
from hf_domino.target.view import TargetModel
from hf_domino.training.hidden_states.folder import (
    ShardWriter,
    StateFolder,
    StateSettings,
    begin,
    row_key,
)
from hf_domino.training.hidden_states.reading import keys_of
from hf_domino.training.objective.distillation import check_final
from hf_domino.training.objective.forward import TargetStates, read_target

GENERATED_TOL = 1e-3  # relative, of losses: roundings of fp32 forwards of other widths, through a drafter
MAX_SHARD_BYTES = 2**29
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
        max_shard_bytes (`int`, *optional*): Largest file. Rows are collected for it in memory, for a minute at most,
            which is what a process that dies loses.

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
        self._autocast, self._shard = autocast, shard
        self._shards = ShardWriter(self.folder, self.settings, max_shard_bytes)
        self._final_is_known = not final
        self._before = StateFolder(self.folder)

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
            ValueError: If the disk has not enough room for them.
        """
        keys, lengths = keys_of(rows)
        first = np.unique(keys, return_index=True)[1]  # of equal rows
        order = first[np.lexsort((keys[first], lengths[first]))]
        is_missing = np.zeros(len(keys), bool)
        is_missing[order] = StateFolder(self.folder).find(keys[order]).shards < 0
        if not is_missing.any():
            return
        self.check_room(int(lengths[is_missing].sum()), f"{is_missing.sum()} of {len(order)} different rows")
        # Which process does a batch depends on nothing that another process may just be writing.
        batches = list(_batches(order, lengths, tokens_per_forward))[self._shard[0] :: self._shard[1]]
        todo = [batch for batch in batches if is_missing[batch].any()]
        total = int(sum(lengths[batch].sum() for batch in todo))
        with tqdm(desc="hidden states", total=total, unit="token", unit_scale=True, disable=not progress) as bar:
            for batch in todo:
                states = self._forward([rows[int(index)]["input_ids"] for index in batch])
                found = zip(batch, states, strict=True)
                self._add({int(keys[index]): row for index, row in found if is_missing[index]})
                bar.update(int(lengths[batch].sum()))
        self._shards.flush()

    def check_room(self, num_tokens: int, what: str) -> None:
        """Say what tokens will take on the disk, and refuse where it has not enough room.

        Args:
            num_tokens (`int`): At most so many.
            what (`str`): Whose they are, for the line that is said.

        Raises:
            ValueError: If there is less room.
        """
        settings, free = self.settings, shutil.disk_usage(self.folder).free
        needed = num_tokens * settings.bytes_per_token
        notice(
            f"hidden states of {what} take {needed / GB:.3g} GB in {self.folder}: {num_tokens} tokens of "
            f"{settings.bytes_per_token} bytes ({settings.num_states} states of {settings.hidden_size} in "
            f"{settings.dtype}); {free / GB:.3g} GB are free."
        )
        if needed > free:
            remedy = "Free some, choose a folder on another disk (--cache-hidden-states), take fewer or shorter rows"
            remedy += "." if dtype_of(settings.dtype).itemsize == 2 else ", or --cache-dtype bfloat16."
            expected = f"at least {needed / GB:.3g} GB, for {num_tokens} tokens"
            raise refusal(f"the room for {self.folder}", expected, f"{free / GB:.3g} GB", remedy)

    def _forward(self, texts: list[Sequence[int]]) -> list[torch.Tensor]:
        ids = [torch.as_tensor(text, dtype=torch.int64) for text in texts]
        # What fills up is never seen: it is on the right, and the target is causal.
        padded = pad_sequence(ids, batch_first=True).to(self.target.input_device)
        with self._autocast():
            read = read_target(self.target, padded, final=self.settings.final)
            if not self._final_is_known and read.final is not None and read.logits is not None:
                check_final(self.target, read.final, read.logits)
                self._final_is_known = True
        return [states[: len(text)] for states, text in zip(self._kept(read), ids, strict=True)]

    def _kept(self, read: TargetStates) -> torch.Tensor:
        """What is stored of a forward, `[B, S, C, H]` on the CPU."""
        parts = (*read.captured, *(() if read.final is None else (read.final,)))
        return torch.stack([part.to(dtype_of(self.settings.dtype)) for part in parts], dim=2).cpu()

    def _add(self, rows: dict[int, torch.Tensor]) -> None:
        """Hand rows, by their keys, to the shards.

        Raises:
            ValueError: If a state is not finite; a training from it would fail far from the cause.
        """
        if not all(torch.isfinite(states).all() for states in rows.values()):
            raise refusal(f"hidden states in {self.settings.dtype}", "finite", "inf or nan", NOT_FINITE)
        self._shards.add(rows)

    def expect(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Check the room as [`~StateWriter.check_room`] does, for what prompts may become.

        Args:
            prompts (`Sequence[Sequence[int]]`): Token ids of each; possibly none.
            max_new_tokens (`int`): Longest continuation.
        """
        if prompts:
            most = sum(map(len, prompts)) + max_new_tokens * len(prompts)
            self.check_room(most, f"at most {len(prompts)} rows to be written")

    @contextmanager
    def recording(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[list[int]]]:
        """Keep the hidden states of rows that the target generates inside.

        Args:
            prompts (`Sequence[Sequence[int]]`): Token ids of the prompts, which the target sees padded on the left.

        Yields:
            `list[list[int]]`: To be filled with the token ids of each row, prompt included.
        """
        pieces: list[torch.Tensor] = []
        written: list[list[int]] = []
        wanted = self.target.capture_kwargs(final=self.settings.final)

        def ask(_: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            return args, kwargs | wanted

        def note(_: Any, args: tuple, outputs: Any) -> None:
            final = outputs.hidden_states[-1] if self.settings.final else None
            pieces.append(self._kept(TargetStates(self.target.captured(outputs), final)))

        model = self.target.model
        handles = [model.register_forward_pre_hook(ask, with_kwargs=True), model.register_forward_hook(note)]
        try:
            yield written
        finally:
            for handle in handles:
                handle.remove()
        if len({len(piece) for piece in pieces}) == 1:  # rows that left the batch early are run again by `write`
            self._keep(prompts, written, torch.cat(pieces, dim=1))

    def _keep(self, prompts: Sequence[Sequence[int]], rows: list[list[int]], states: torch.Tensor) -> None:
        """Keep what was seen `[B, S, C, H]` of rows, without the padding before and what came after them."""
        longest, kept = max(map(len, prompts)), {}
        for prompt, row, seen in zip(prompts, rows, states, strict=True):
            start = longest - len(prompt)
            own = seen[start : start + len(row) - 1]
            kept[row_key(row)] = F.pad(own, (0, 0, 0, 0, 0, len(row) - len(own)))
        keys = np.array(list(kept), dtype=np.int64)
        is_new = self._before.find(keys).shards < 0
        self._add({key: kept[key] for key in keys[is_new].tolist()})

    def flush(self) -> None:
        """Write what was kept and is no whole shard yet."""
        self._shards.flush()


def _batches(order: np.ndarray, lengths: np.ndarray, tokens: int) -> Iterator[np.ndarray]:
    """Cut rows, the shortest first, into batches of at most so many tokens once they are padded."""
    start = 0
    for end, index in enumerate(order):
        if end > start and (end - start + 1) * lengths[index] > tokens:
            yield order[start:end]
            start = end
    yield order[start:]

"""Compute and write hidden states, with target forwards over examples of similar length.

Shapes: S sequence length, C hidden states kept per token, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_domino._common.atomic_writes import write_atomic
from hf_domino._common.dtypes import dtype_of
from hf_domino._common.errors import invalid_argument
from hf_domino._common.notices import notice
from hf_domino.configuration.domino_config import DominoConfig
from hf_domino.targets.identity import identify
from hf_domino.targets.view import TargetModel
from hf_domino.training.hidden_states.folder import (
    INDEX_FILE,
    START_AGAIN,
    StateSettings,
    find_rows,
    keys_of,
    write_shard,
)
from hf_domino.training.objective.forward import check_final, read_target

MAX_SHARD_BYTES = 2**27
TOKENS_PER_FORWARD = 8192
TOKENS_IN_CACHE = 1024  # whose activations stay in a CPU's caches: Qwen2.5-Coder-0.5B read 1.6 times as fast with them
GB = 1e9
MAKE_ROOM = (
    "Free some space, choose a folder on another disk (--cache-hidden-states), use fewer or shorter examples, or store "
    "them in bfloat16 (--cache-dtype)."
)
NOT_FINITE = (
    "Store them in a dtype of wider range (--cache-dtype bfloat16, in another folder). If the target computes such "
    "values itself, run it in a wider dtype."
)


class StateWriter:
    """Writes the hidden states that a folder lacks.

    Args:
        target (`PreTrainedModel`): The target, in evaluation mode.
        config (`DominoConfig`): Configuration of the drafter that will read the states, for `target_layer_ids`.
        folder (`str` or `Path`): Folder for the states; it does not have to exist. States that it already holds are
            kept if they belong to this target and these layers.
        dtype (`str`, *optional*, defaults to `"bfloat16"`): dtype in which to store the states: `"bfloat16"`,
            `"float16"`, `"float32"`, or `"auto"` for the target's own dtype. With `"auto"`, training gives bit for bit
            the same result as without stored states, provided that the target runs over the same batches.
        final (`bool`, *optional*, defaults to `True`): Keep the state that lm_head reads, too, for distillation, which
            is the default of [`DominoTrainingArguments`].
        autocast (`Callable`, *optional*): Returns the autocast context of the forwards, the same as in training.
        shard (`tuple[int, int]`, *optional*, defaults to (0, 1)): Index of this process and number of processes.
        max_shard_bytes (`int`, *optional*): Size of the largest file in bytes. States are collected in memory until a
            file is full, so a process that dies loses the ones that it has not written.

    Raises:
        ValueError: If the folder was begun with another target, other layers or another dtype.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        config: DominoConfig,
        folder: str | Path,
        dtype: str = "bfloat16",
        final: bool = True,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        shard: tuple[int, int] = (0, 1),
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ):
        self.target = TargetModel(target, config.layer_ids(target.config))
        self.folder = Path(folder)
        known = dtype_of(target.dtype if dtype == "auto" else dtype, "cache_dtype", "Choose one of them, or auto.")
        name = str(known).removeprefix("torch.")
        layer_ids = tuple(config.target_layer_ids or ())
        wanted = StateSettings(identify(target), layer_ids, config.hidden_size, name, final)
        self.settings = StateSettings.load(self.folder) or wanted
        if self.settings is wanted:
            write_atomic(self.folder / INDEX_FILE, json.dumps(asdict(wanted), indent=2) + "\n")
        self.settings.validate_for(self.folder, config, final, target)
        if self.settings.dtype != wanted.dtype:
            made = f"{self.settings.dtype!r}, the dtype of the states in {folder}"
            raise invalid_argument("cache_dtype", made, wanted.dtype, START_AGAIN.format(folder=folder))
        self._autocast = autocast
        self._shard = shard
        self._max_bytes = max_shard_bytes

    def missing(self, rows: Any) -> dict[int, tuple[int, int]]:
        """Find the examples whose states the folder lacks; return length and index of each by key.

        Args:
            rows (`Sequence[dict]`): Examples with `input_ids`. Examples with the same tokens count once.
        """
        known = find_rows(self.folder)
        return {key: (length, index) for index, (key, length) in enumerate(keys_of(rows)) if key not in known}

    def write(self, rows: Any, tokens_per_forward: int | None = None, progress: bool = True) -> None:
        """Run the target over this process's share of the missing examples, and write their states.

        Examples are sorted by length, so that batches have little padding.

        Args:
            rows (`Sequence[dict]`): Examples with `input_ids`.
            tokens_per_forward (`int`, *optional*): Maximum number of tokens in a batch, padding included; defaults to
                8192, and to 1024 on a CPU. A batch has at least one example, even if that is longer.
            progress (`bool`, *optional*, defaults to `True`): Show a progress bar.

        Raises:
            ValueError: If the disk has too little free space for the states, or a state is not finite.
        """
        on_cpu = self.target.input_device.type == "cpu"
        most = tokens_per_forward or (TOKENS_IN_CACHE if on_cpu else TOKENS_PER_FORWARD)
        missing = self.missing(rows)
        process, num_processes = self._shard
        if not missing:
            return
        settings = self.settings
        num_tokens = sum(length for length, _ in missing.values())
        needed, free = (size / GB for size in (num_tokens * settings.bytes_per_token, disk_usage(self.folder).free))
        takes = f"{needed:.3g} GB: {num_tokens} tokens of {settings.bytes_per_token} bytes ({settings.num_states} "
        takes += f"states of {settings.hidden_size} in {settings.dtype})"
        if needed > free:
            raise invalid_argument(
                f"the free space for {self.folder}", f"at least {takes}", f"{free:.3g} GB", MAKE_ROOM
            )
        notice(f"hidden states of {len(missing)} examples take {takes} in {self.folder}; {free:.3g} GB are free.")
        if settings.final:
            with self._autocast():
                check_final(self.target)
        # Only the example itself decides which process writes its states.
        mine = {key: place for key, place in missing.items() if key % num_processes == process}
        batches: list[list[int]] = [[]]
        for key in sorted(mine, key=lambda key: (mine[key][0], key)):
            if batches[-1] and (len(batches[-1]) + 1) * mine[key][0] > most:
                batches.append([])
            batches[-1].append(key)
        total = sum(length for length, _ in mine.values())
        shard = dict[int, torch.Tensor]()
        with tqdm(desc="hidden states", total=total, unit="token", unit_scale=True, disable=not progress) as bar:
            for batch in filter(None, batches):
                states = self._forward([rows[mine[key][1]]["input_ids"] for key in batch])
                size = sum(map(len, (*shard.values(), *states)))
                if shard and size * settings.bytes_per_token > self._max_bytes:
                    write_shard(self.folder, shard)
                    shard = {}
                shard |= zip(batch, states, strict=True)
                bar.update(sum(map(len, states)))
        if shard:
            write_shard(self.folder, shard)

    def _forward(self, texts: list[Sequence[int]]) -> list[torch.Tensor]:
        """Compute the hidden states `[S, C, H]` of some sequences, on the CPU."""
        ids = [torch.as_tensor(text, dtype=torch.int64) for text in texts]
        # No attention mask is needed: the padding is on the right, where a causal target never sees it.
        padded = pad_sequence(ids, batch_first=True).to(self.target.input_device)
        with self._autocast():
            captured, final = read_target(self.target, {"input_ids": padded}, final=self.settings.final)
        parts = captured if final is None else (*captured, final)
        kept = torch.stack([part.to(dtype_of(self.settings.dtype)) for part in parts], dim=2).cpu()
        states = [row[: len(text)] for row, text in zip(kept, ids, strict=True)]
        if not all(torch.isfinite(row).all() for row in states):  # training on them would fail far from the cause
            raise invalid_argument(f"hidden states in {self.settings.dtype}", "finite", "inf or nan", NOT_FINITE)
        return states

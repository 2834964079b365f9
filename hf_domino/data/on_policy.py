"""Training text written by the target itself, batched and resumable.

A drafter learns to predict its target, and the target's own text is what it will be asked to draft.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_domino._common.whole_files import MAKE_ROOM, needing_room, write_whole
from hf_domino.data.settings import check_settings, read_settings
from hf_domino.data.writers import SEED_STRIDE, Sampling, TargetWriter
from hf_domino.target.identity import identify


class StateKeeper(Protocol):
    """Looks on while the target writes, and keeps its hidden states; [`~training.StateWriter`] is one."""

    def expect(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Refuse a disk without room for what these prompts may become."""

    def recording(self, prompts: Sequence[Sequence[int]]) -> AbstractContextManager[list[list[int]]]:
        """Keep the states of the forwards inside, over prompts padded on the left; yields a list to put the rows in."""

    def flush(self) -> None:
        """Write what was kept."""


@dataclass(frozen=True)
class _PromptBatch:
    index: int
    prompts: list[list[int]]
    temperature: float


def generate_on_policy(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    output: str | Path,
    max_new_tokens: int = 256,
    temperatures: Sequence[float] = (0.0, 0.7, 1.0),
    batch_size: int = 64,
    seed: int = 0,
    bf16: bool = False,
    shard: tuple[int, int] = (0, 1),
    progress: bool = True,
    overwrite: bool = False,
    states: StateKeeper | None = None,
) -> Path:
    """Let the target continue prompts, and write what it says as token ids.

    Prompts are sorted by length, so that batches hold little padding, and batches take the temperatures in turn. Each
    batch has its own seed and is written at once: after an interruption the same call goes on where it stopped and
    ends with the same file. Sampling follows the target's own law at that temperature, without top-k, top-p and such.

    Args:
        target (`PreTrainedModel`): The target, in evaluation mode.
        prompts (`Sequence[Sequence[int]]`): Token ids, none empty.
        output (`str` or `Path`): JSON-lines file, the one returned, with an object per prompt: `input_ids` (prompt and
            continuation), `prompt_length` and `temperature`, which [`load_rows`] reads. Settings are kept beside it.
        max_new_tokens (`int`, *optional*, defaults to 256): Longest continuation.
        temperatures (`Sequence[float]`, *optional*, defaults to (0.0, 0.7, 1.0)): 0 is greedy.
        batch_size (`int`, *optional*, defaults to 64): Prompts per batch.
        seed (`int`, *optional*, defaults to 0): Of the sampling.
        bf16 (`bool`, *optional*, defaults to `False`): Generate under bf16 autocast; 1.6 times as fast on some CPUs.
        shard (`tuple[int, int]`, *optional*, defaults to (0, 1)): This process and the number of processes that share
            the prompts, each with an `output` of its own; together they write what one process would.
        progress (`bool`, *optional*, defaults to `True`): Show a progress bar.
        overwrite (`bool`, *optional*, defaults to `False`): Start an `output` of another target or settings again.
        states (`StateKeeper`, *optional*): Keeps the hidden states of the forwards, for training from them.

    Raises:
        ValueError: If there are no prompts, one is empty, or `output` was begun with another target or other settings.
    """
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"prompts must be non-empty lists of token ids, got {len(prompts)} with one empty or none.")
    output = Path(output)
    settings = {"max_new_tokens": max_new_tokens, "temperatures": list(temperatures), "batch_size": batch_size}
    settings |= {"seed": seed, "bf16": bf16, "shard": list(shard), "digest of prompts": _digest(prompts)}
    _begin(output, settings | {"target": identify(target).to_dict()}, overwrite)
    batches = list(_plan(prompts, temperatures, batch_size))[shard[0] :: shard[1]]
    done = _keep_whole_batches(output, [len(batch.prompts) for batch in batches])
    writer = TargetWriter(target, bf16)
    if states is not None:
        states.expect([prompt for batch in batches[done:] for prompt in batch.prompts], max_new_tokens)
    with needing_room(output, MAKE_ROOM), output.open("a", encoding="utf-8") as file:
        bar = tqdm(batches[done:], "on-policy text", len(batches), initial=done, unit="batch", disable=not progress)
        for batch in bar:
            rows = _write(writer, batch, max_new_tokens, seed * SEED_STRIDE + batch.index, states)
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
    if states is not None:
        states.flush()
    return output


def _digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()[:16]


def _plan(prompts: Sequence[Sequence[int]], temperatures: Sequence[float], batch_size: int) -> Iterator[_PromptBatch]:
    ordered = sorted((list(prompt) for prompt in prompts), key=len)
    for index, start in enumerate(range(0, len(ordered), batch_size)):
        yield _PromptBatch(index, ordered[start : start + batch_size], temperatures[index % len(temperatures)])


def settings_file(output: Path) -> Path:
    """Where the settings of a text are kept, the target among them."""
    return output.with_name(output.name + ".settings.json")


def _begin(output: Path, settings: dict[str, Any], overwrite: bool) -> None:
    """Note the settings of a new file; refuse to continue one that was begun differently, or start it again."""
    path = settings_file(output)
    if path.exists() and output.exists():
        try:
            check_settings(output, read_settings(path), settings)
            return
        except ValueError:
            if not overwrite:
                raise
            output.unlink()
    write_whole(path, json.dumps(settings))


def _keep_whole_batches(output: Path, sizes: Sequence[int]) -> int:
    """Cut a partly written batch off the file and return how many whole batches it holds."""
    if not output.exists():
        return 0
    lines = output.read_bytes().splitlines(keepends=True)
    whole = sum(line.endswith(b"\n") for line in lines)
    done = rows = 0
    while done < len(sizes) and rows + sizes[done] <= whole:
        rows += sizes[done]
        done += 1
    os.truncate(output, sum(map(len, lines[:rows])))  # what stays is not written again: that could fail
    return done


def _write(
    writer: TargetWriter, batch: _PromptBatch, max_new_tokens: int, seed: int, states: StateKeeper | None
) -> list[dict[str, Any]]:
    recording = nullcontext([]) if states is None else states.recording(batch.prompts)
    with recording as written:
        texts = writer.write(batch.prompts, Sampling(max_new_tokens, batch.temperature), seed)
        whole = [prompt + text.ids for prompt, text in zip(batch.prompts, texts, strict=True)]
        written += whole
    return [
        {"input_ids": ids, "prompt_length": len(prompt), "temperature": batch.temperature}
        for prompt, ids in zip(batch.prompts, whole, strict=True)
    ]

"""Units of work: seeded pieces, each with a file of its own, which any process may do, in any order, at any time.

A unit's file is written whole or not at all, and holds the same rows whoever writes it. So a run may be interrupted
anywhere and go on with another number of processes, and no process waits for another: one that has done its share
does what is missing of the others'.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_domino._common.whole_files import write_whole

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Workplace:
    """Where units lie, and which of them this process (`shard` is its number, and how many there are) does first."""

    folder: Path
    shard: tuple[int, int] = field(default=(0, 1))
    progress: bool = True

    def do(self, name: str, count: int, make: Callable[[int], tuple[Rows, int]]) -> list[Rows]:
        """Rows of the units of a stage; `make` gives those of a missing one, by its number, and their tokens."""
        paths = [self.folder / f"{name}-{index:06d}.json" for index in range(count)]
        own = range(self.shard[0], count, self.shard[1])
        others = (index for index in reversed(range(count)) if index not in own)
        done = sum(path.exists() for path in paths)
        with tqdm(desc=name, total=count, initial=done, unit="batch", disable=not self.progress) as bar:
            for index in (*own, *others):
                if not paths[index].exists():
                    seconds, tokens = _do(paths[index], index, make)
                    bar.set_postfix_str(f"{tokens / seconds:.0f} tokens/s")
                bar.update(max(0, sum(path.exists() for path in paths) - bar.n))
        return [json.loads(path.read_text(encoding="utf-8"))["rows"] for path in paths]

    def work_done(self) -> tuple[int, float]:
        """Tokens written in all units so far, and the seconds that it took, added up over processes."""
        units = list(self._units())
        return sum(unit["tokens"] for unit in units), sum(unit["seconds"] for unit in units)

    def _units(self) -> Iterator[dict[str, Any]]:
        for path in sorted(self.folder.glob("*.json")):
            yield json.loads(path.read_text(encoding="utf-8"))


def _do(path: Path, index: int, make: Callable[[int], tuple[Rows, int]]) -> tuple[float, int]:
    start = time.perf_counter()
    rows, tokens = make(index)
    seconds = time.perf_counter() - start
    write_whole(path, json.dumps({"seconds": round(seconds, 3), "tokens": tokens, "rows": rows}))
    return seconds, tokens

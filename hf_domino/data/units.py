"""Units of work: seeded pieces, each with a file of its own, which any process may do, in any order, at any time.

A unit's file is written whole or not at all, and holds the same rows whoever writes it. So a run may be interrupted
anywhere and go on with another number of processes, and no process waits for another: one that has done its share
does what is missing of the others'.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_domino._common.whole_files import write_whole

Rows = list[dict[str, Any]]
Make = Callable[[int], tuple[Rows, int]]  # rows of a unit by its number, and how many tokens were written for them
Do = Callable[[str, int, Make], Rows]  # `do_units` in one folder


def do_units(folder: Path, shard: tuple[int, int], progress: bool, name: str, count: int, make: Make) -> Rows:
    """Make the missing units of a stage, those of this process first, and return the rows of all."""
    paths = [folder / f"{name}-{index:06d}.json" for index in range(count)]
    own = range(shard[0], count, shard[1])
    others = (index for index in reversed(range(count)) if index not in own)
    missing = [index for index in (*own, *others) if not paths[index].exists()]
    for index in tqdm(missing, name, unit="batch", disable=not progress):
        if not paths[index].exists():  # another process may have been faster
            start = time.perf_counter()
            rows, tokens = make(index)
            seconds = round(time.perf_counter() - start, 3)
            write_whole(paths[index], json.dumps({"seconds": seconds, "tokens": tokens, "rows": rows}))
    return [row for path in paths for row in _read(path)["rows"]]


def work_done(folder: Path) -> tuple[int, float]:
    """Add up the tokens and the seconds of all units so far, over all processes."""
    units = [_read(path) for path in folder.glob("*.json")]
    return sum(unit["tokens"] for unit in units), sum(unit["seconds"] for unit in units)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))

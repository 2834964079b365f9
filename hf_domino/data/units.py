"""Units of work: seeded pieces, each with a file of its own, which any process may do, in any order, at any time.

A unit's file is written whole or not at all, and holds the same rows whoever writes it. So a run may be interrupted
anywhere and go on with another number of processes, and no process waits for another: one that has done its share
does what is missing of the others'.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_domino._common.whole_files import write_whole

Rows = list[dict[str, Any]]
Make = Callable[[int], Rows]  # rows of a unit by its number
Do = Callable[[str, int, Make], Rows]  # `do_units` in one folder


def do_units(folder: Path, shard: tuple[int, int], progress: bool, name: str, count: int, make: Make) -> Rows:
    """Make the missing units of a stage, those of this process first, and return the rows of all."""
    paths = [folder / f"{name}-{index:06d}.json" for index in range(count)]
    own = range(shard[0], count, shard[1])
    others = (index for index in reversed(range(count)) if index not in own)
    missing = [index for index in (*own, *others) if not paths[index].exists()]
    for index in tqdm(missing, name, unit="batch", disable=not progress):
        if not paths[index].exists():  # another process may have been faster
            write_whole(paths[index], json.dumps({"rows": make(index)}))
    return [row for path in paths for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]

"""Split work into seeded units with one file each, which any process can do, in any order, at any time.

The file of a unit is written atomically, and its content does not depend on the process that writes it. So you can
interrupt a run at any time and resume it with another number of processes. No process waits for another: when it has
finished its share, it continues with the missing units of the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_domino._common.atomic_writes import write_atomic
from hf_domino._common.errors import invalid_argument

WRITE_AGAIN = "Delete it and run the same command again, which writes only what is missing."
Rows = list[dict[str, Any]]
Make = Callable[[int], Rows]  # makes the results of the unit with this number
RunUnits = Callable[[str, int, Make], Rows]  # `run_units` in one folder


def run_units(folder: Path, shard: tuple[int, int], progress: bool, name: str, count: int, make: Make) -> Rows:
    """Make the missing units of a stage, starting with those of this process, and return the results of all units."""
    paths = [folder / f"{name}-{index:06d}.json" for index in range(count)]
    own = range(shard[0], count, shard[1])
    others = (index for index in reversed(range(count)) if index not in own)
    missing = [index for index in (*own, *others) if not paths[index].exists()]
    for index in tqdm(missing, name, unit="batch", disable=not progress):
        if not paths[index].exists():  # another process can have been faster
            write_atomic(paths[index], json.dumps({"rows": make(index)}))
    return [row for path in paths for row in read_written(path, WRITE_AGAIN)["rows"]]


def read_written(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON file that this program wrote, which a crash of the machine can have cut."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise invalid_argument(str(path), "a whole JSON file", str(error), remedy) from error
    return found

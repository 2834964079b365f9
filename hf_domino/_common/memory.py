"""How much memory this process can still take, of the machine or of its container."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def available_memory(root: Path = ROOT) -> int:
    """Return how many bytes of memory this process can still take.

    Args:
        root (`Path`): The folder that holds `proc` and `sys`.
    """
    import psutil  # a requirement of accelerate

    free = psutil.virtual_memory().available
    for folder, limit_name, used_name, cache_name in _groups(root):
        with suppress(OSError, ValueError, KeyError):  # where there is no such limit
            left = int((folder / limit_name).read_text()) - int((folder / used_name).read_text())
            # Pages of files count as used until somebody else needs the memory.
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = min(free, left + int(statistics[cache_name]))
    return max(free, 0)


def _groups(root: Path) -> list[tuple[Path, str, str, str]]:
    """Return the control groups of this process from the inside to the outside, each with the names of its files."""
    found = []
    mounted = root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            inner = Path(path.lstrip("/"))
            if not controllers:  # version 2
                folder = mounted
                names = "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                folder = mounted / "memory"
                names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            else:
                continue
            # A container often sees its own group as the outermost one, and a path that only its host has.
            found += [(folder / group, *names) for group in (inner, *inner.parents)]
    return found

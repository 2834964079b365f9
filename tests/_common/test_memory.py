"""How much memory is free in a container: what its limits leave, without pages of files that can be dropped."""

from __future__ import annotations

import pytest

from hf_domino._common.memory import available_memory

MEGABYTE = 2**20
VERSION_2 = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
VERSION_1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def in_groups(tmp_path, monkeypatch):
    """Write the files of this process's control groups, and return how many megabytes are free."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 900 * MEGABYTE}))

    def free(version, process, groups):
        mounted, limit_name, used_name, cache_name = version
        write(tmp_path, "proc/self/cgroup", process)
        for group, (limit, used, cached) in groups.items():
            folder = f"{mounted}/{group}"
            write(tmp_path, f"{folder}/{limit_name}", limit if isinstance(limit, str) else f"{limit * MEGABYTE}\n")
            write(tmp_path, f"{folder}/{used_name}", f"{used * MEGABYTE}\n")
            write(tmp_path, f"{folder}/memory.stat", f"anon 5\n{cache_name} {cached * MEGABYTE}\n")
        return available_memory(tmp_path) / MEGABYTE

    return free


@pytest.mark.parametrize(
    ("version", "process"), [(VERSION_2, "0::/a/b\n"), (VERSION_1, "5:cpu,memory:/a/b\n1:cpuset:/\n")]
)
@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"": (300, 100, 0)}, 200),
        ({"": (300, 290, 250)}, 260),  # pages of files are dropped when somebody needs the memory
        ({"a/b": (300, 100, 0)}, 200),
        ({"a/b": (300, 100, 0), "a": (150, 120, 20), "": (800, 700, 0)}, 50),
        ({"a/b": ("max\n", 100, 0)}, 900),
        ({"": (100, 120, 0)}, 0),
        ({"elsewhere": (100, 50, 0)}, 900),
        ({}, 900),
    ],
)
def test_free_memory_is_what_all_limits_leave(version, process, groups, expected, in_groups):
    assert in_groups(version, process, groups) == expected


def test_a_machine_without_control_groups_has_what_the_system_says(tmp_path, monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 900}))
    assert available_memory(tmp_path) == 900

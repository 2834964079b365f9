"""Files are there whole or not at all, also where there is no room for them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_domino._common.atomic_writes import atomic_write, check_writable, needing_room, write_atomic

WRITERS = {
    "text": lambda path: path.write_text("a" * 100_000),
    "torch": lambda path: torch.save(torch.zeros(100_000), path),
    "old torch": lambda path: torch.save(torch.zeros(100_000), path, _use_new_zipfile_serialization=False),
    "safetensors": lambda path: save_file({"zeros": torch.zeros(100_000)}, path),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_without_room_is_named_and_what_was_there_stays(writer, no_file_beyond, tmp_path):
    path = tmp_path / "rows"
    write_atomic(path, "before")
    with pytest.raises(OSError) as raised, no_file_beyond(10_000), atomic_write(path) as aside:
        WRITERS[writer](aside)
    why = "a write fell short" if writer == "torch" else "File too large"
    assert str(raised.value).startswith(f"{path} could not be written: {why}. ")
    assert " GB are free in" in str(raised.value)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_file_that_is_mounted_by_itself_is_written_over(tmp_path, monkeypatch):
    """As one of a container: the system renames nothing to it."""
    path = tmp_path / "mounted"
    write_atomic(path, "before")

    def busy(source, destination):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), source, None, destination)

    monkeypatch.setattr(os, "replace", busy)
    write_atomic(path, "after")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["after"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no such folder")
def test_a_folder_that_takes_no_file_is_refused_also_for_root():
    with pytest.raises(ValueError, match="--html must be a folder that can be written to, got '/proc/self/new'"):
        check_writable(Path("/proc/self/new"), "--html")


def test_the_folder_of_a_file_is_made(tmp_path):
    write_atomic(tmp_path / "new" / "rows.jsonl", "{}")
    assert (tmp_path / "new" / "rows.jsonl").read_text() == "{}"


def test_what_is_wrong_otherwise_is_said_as_it_is(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(FileExistsError, match="taken"), atomic_write(tmp_path / "taken" / "rows") as aside:
        aside.write_text("")
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), needing_room(tmp_path, ""):
        raise RuntimeError("shapes differ")

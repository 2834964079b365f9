"""Whole checkpoints.

A trainer writes `trainer_state.json` last: a checkpoint without it is one of a run that was killed inside a save.
"""

from __future__ import annotations

import json
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_domino._common.notices import notice

STATE_FILE = "trainer_state.json"


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest whole checkpoint in a folder, which need not exist; those that are not are skipped with a word."""
    steps = {path: path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in Path(output_dir).glob("*-*")}
    found = sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: -int(steps[path]))
    if partial := [path.name for path in found if not is_whole(path)]:
        notice(f"{output_dir}: unfinished {', '.join(partial)} of a run that was killed is left out.")
    return next((str(path) for path in found if is_whole(path)), None)


def is_whole(folder: Path) -> bool:
    """Whether all of a checkpoint, or of a finished run, was written: its state is, which comes last."""
    try:
        json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True

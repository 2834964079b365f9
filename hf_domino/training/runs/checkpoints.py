"""Whole checkpoints, and a stop on a signal that saves one first.

A trainer writes `trainer_state.json` last: a checkpoint without it is one of a run that was killed inside a save.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_domino._common.notices import notice

GO_ON = (
    "Earlier checkpoints are kept. Make room and start the same command again: it goes on from the last one "
    "(save_total_limit says how many are kept)."
)
STEPS_BETWEEN_QUESTIONS = 10  # of processes for a signal, which wait for each other
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


class StopOnSignal(TrainerCallback):
    """Ends training with the step in which a signal reached any process, and has that step saved.

    Args:
        accelerator (`Accelerator`): Tells all processes.
    """

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.stopped_by: signal.Signals | None = None
        self._asked = 0  # the number of a signal
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """Note signals while training runs; only the main thread may."""
        self.stopped_by, self._asked = None, 0
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) or signal.SIG_DFL for number in signals}
        try:
            yield
        finally:
            self._listen_no_more()

    def _ask(self, number: int, frame: Any) -> None:
        self._asked = number
        if number == signal.SIGINT:
            notice("stopping after this step, which is saved; Ctrl-C again stops at once.")
            self._listen_no_more()

    def _listen_no_more(self) -> None:
        for number, previous in self._before.items():
            signal.signal(number, previous)
        self._before = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask all processes every few steps, as the signal need not reach them in the same step."""
        number = self._asked
        if self.accelerator.num_processes > 1:
            if state.global_step % STEPS_BETWEEN_QUESTIONS and not control.should_log:
                return
            number = int(self.accelerator.gather(torch.tensor(number, device=self.accelerator.device)).max())
        if number:
            self.stopped_by = signal.Signals(number)
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False
            notice(
                f"stopped by a signal after step {state.global_step} of {state.max_steps}; "
                f"{PREFIX_CHECKPOINT_DIR}-{state.global_step} is saved, and the same command goes on from it."
            )

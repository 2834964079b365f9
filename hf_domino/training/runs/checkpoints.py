"""A trainer whose checkpoints are whole or not there, and that saves one when it is asked to stop.

A checkpoint is written aside and gets its name when all of it is on disk: a run that is killed leaves what it had.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from hf_domino._common.notices import notice
from hf_domino._common.refusal import refusal
from hf_domino._common.whole_files import needing_room
from hf_domino.training.runs.locking import alone_in_folder
from hf_domino.training.scale.sharding import broken_weights

GO_ON = (
    "Earlier checkpoints are kept. Make room and start the same command again: it goes on from the last one "
    "(save_total_limit says how many are kept)."
)
UNFINISHED = "_unfinished"  # uploads of a trainer leave out names that start so
STEPS_BETWEEN_QUESTIONS = 10  # of processes for a signal, which wait for each other
STATE_FILE = "trainer_state.json"  # a trainer writes it last


def last_checkpoint(output_dir: str | Path) -> str | None:
    """The newest whole checkpoint in a folder; those that are not are skipped with a word.

    Args:
        output_dir (`str` or `Path`): The folder; it need not exist.

    Returns:
        `str`, *optional*: Its folder.
    """
    steps = {path: path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-") for path in Path(output_dir).glob("*-*")}
    found = sorted((path for path, step in steps.items() if step.isdigit()), key=lambda path: -int(steps[path]))
    partial = [path.name for path in found if not is_whole(path)]
    partial += sorted(path.name for path in Path(output_dir, UNFINISHED).glob("*"))
    if partial:
        notice(f"{output_dir}: unfinished {', '.join(partial)} of a run that was killed is left out.")
    return next((str(path) for path in found if is_whole(path)), None)


def is_whole(folder: Path) -> bool:
    """Whether all of a checkpoint, or of a finished run, was written: its state is, which comes last."""
    try:
        json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


class CheckpointingTrainer(Trainer):
    """Transformers' trainer with whole checkpoints of finite weights, and a stop on a signal that saves first.

    Attributes:
        stop_signals (`tuple`): Signals that end a training so, SIGTERM; a command adds Ctrl-C. A second one of these
            ends it at once.
    """

    stop_signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    _is_saving = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._stop = _StopOnSignal(self.accelerator)
        if not self.args.enable_jit_checkpoint:  # that is Transformers' own way to do so
            self.add_callback(self._stop)

    @property
    def stopped_by_signal(self) -> signal.Signals | None:
        """What ended the last training early, if a signal did; its last step is saved as a checkpoint."""
        return self._stop.stopped_by

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as [`~transformers.Trainer.train`] does; after a signal, end with the step and save a checkpoint.

        Raises:
            ValueError: If another run is at work in `output_dir`.
        """
        with alone_in_folder(self.args), self._stop.listening(self.stop_signals):
            if self.is_local_process_zero():
                shutil.rmtree(Path(self.args.output_dir, UNFINISHED), ignore_errors=True)
            return super().train(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the drafter.

        Raises:
            ValueError: If a weight is not finite; nothing is written then.
        """
        broken = broken_weights(self.model)
        if broken:
            field = f"the drafter's weights after step {self.state.global_step}"
            remedy = "They are not saved. Go on from an earlier checkpoint with a lower learning rate."
            raise refusal(field, "finite", f"nan or inf in {', '.join(broken[:3])} ({len(broken)} tensors)", remedy)
        super().save_model(output_dir, _internal_call)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self._get_output_dir(trial))
        checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        aside = folder / UNFINISHED / checkpoint.name
        self._is_saving = True
        try:
            with needing_room(checkpoint, GO_ON, self._least_bytes()):
                super()._save_checkpoint(model, trial)
        except OSError:
            shutil.rmtree(aside.parent, ignore_errors=True)  # it takes room that is wanted
            raise
        finally:
            self._is_saving = False
        best = self.state.best_model_checkpoint
        if best is not None and Path(best) == aside:  # it was looked for where it was being written
            self.state.best_model_checkpoint = str(checkpoint)
            if self.args.should_save:
                self.state.save_to_json(str(aside / STATE_FILE))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            _publish(aside, checkpoint)
            rotate_checkpoints(str(folder), self.args.save_total_limit, self.state.best_model_checkpoint, True)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))

    def _least_bytes(self) -> int:
        """What the trained weights take; most optimizers keep twice as much beside them."""
        weights = (weight for weight in self.model.parameters() if weight.requires_grad)
        return sum(weight.numel() * weight.element_size() for weight in weights)

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._is_saving else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._is_saving:  # uploads run in the background, from a folder that must not be renamed meanwhile
            super()._push_from_checkpoint(checkpoint_folder)


def _publish(aside: Path, checkpoint: Path) -> None:
    """Give a checkpoint that was written aside its name, in place of one that has it."""
    if checkpoint.exists():
        os.rename(checkpoint, aside.with_name("replaced"))
    os.rename(aside, checkpoint)
    shutil.rmtree(aside.parent)


class _StopOnSignal(TrainerCallback):
    """Ends training with the step in which a signal reached any process, and has that step saved."""

    def __init__(self, accelerator: Any):
        self.accelerator = accelerator
        self.stopped_by: signal.Signals | None = None
        self._asked = 0  # the number of a signal
        self._before: dict[int, Any] = {}

    @contextmanager
    def listening(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """Note signals while training runs; only the main thread may."""
        self.stopped_by, self._asked = None, 0
        if threading.current_thread() is not threading.main_thread():
            yield
            return
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

"""The noise of sampling: that of every step drawn once, in order, as plain `generate` draws it.

For one draw, `torch.multinomial(probs, 1)` is argmax(probs / E) with E standard exponential: one tensor `[B, V]` a step
from the default generator, rows that have ended included. So a token is a function of its scores and of the noise of
its step. Drafts are chosen with the noise of the steps that they are for, and no draft changes what is drawn (arXiv
2408.07978).

Drafting draws ahead, and what was drawn in vain has to be taken back. Were that done to the default generator itself,
what runs beside the call would see the same numbers. So a call draws from a copy. Meanwhile the default one goes on
from a seed nobody else has, and at the end it gets the state that it is owed.

Several steps are never drawn as one tensor: on a GPU, and where a CPU's numbers come from MKL, those are others.

Shapes: B rows of the batch, R rows still generated, N steps, V vocabulary.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Sequence

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

MAX_BYTES = 2**28  # of noise to keep; what does not fit is drawn again

_lock = threading.RLock()  # a call that was given up may be collected, and give back, while its thread holds it
_borrowers: dict[torch.Generator, CallGenerator] = {}  # by the default generator that a call has copied


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that `torch.multinomial` draws from on a device; None where its state does not tell the text.

    That is so on MPS, where plain generation stops a step late and draws once more.
    """
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    if generators:
        return generators[module.current_device() if device.index is None else device.index]
    return None


def _begin_in_child() -> None:
    """After a fork no call of the parent gives anything back."""
    global _lock
    _lock = threading.RLock()
    _borrowers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


class CallGenerator:
    """The numbers of one call: those the default generator would have given it.

    A call that starts while another one runs has a seed of its own instead: what plain calls side by side are given is
    by chance too.

    Args:
        device (`torch.device`): Where tokens are drawn.
    """

    def __init__(self, device: torch.device):
        self.generator = torch.Generator(device)
        self._default = default_generator(device)
        self._thread = threading.get_ident()
        self._left_at = torch.empty(0)  # state of the default generator while it is borrowed
        self._left_seed = 0
        with _lock:
            if self._default is None:
                self.generator.manual_seed(_drawn_seed(torch.default_generator))
            elif self._can_borrow(self._default):
                self._borrow(self._default)
            else:
                self.generator.manual_seed(_drawn_seed(self._default))
                _borrowers[self._default]._left_at = self._default.get_state()

    def _can_borrow(self, default: torch.Generator) -> bool:
        """Whether no call has, or only one of this thread that was given up: since then it was seeded anew."""
        other = _borrowers.get(default)
        return other is None or (other._thread == self._thread and other._was_seeded(default))

    def _borrow(self, default: torch.Generator) -> None:
        _borrowers[default] = self
        start = default.get_state()
        self.generator.set_state(start)
        default.manual_seed(_seed(start))
        self._left_at = default.get_state()
        self._left_seed = default.initial_seed()

    def _was_seeded(self, default: torch.Generator) -> bool:
        return default.initial_seed() != self._left_seed

    def give_back(self, state: torch.Tensor) -> None:
        """Set the default generator to this state, if it is owed one; a seed it was given meanwhile stands."""
        default = self._default
        with _lock:
            if default is None or _borrowers.get(default) is not self:
                return
            del _borrowers[default]
            if self._was_seeded(default):
                return
            has_moved = not torch.equal(default.get_state(), self._left_at)
            default.set_state(state)
        if has_moved:
            logger.warning_once(
                "Something drew from torch's default generator while hf_domino generated: a logits processor, a "
                "stopping criterion, a streamer or another thread. The text follows the target's distribution, but is "
                "not the one that plain generation writes from the same seed. Draw from a torch.Generator of your own "
                "there."
            )


def _seed(state: torch.Tensor) -> int:
    """A seed that depends on a generator's state."""
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest(), "little")


def _drawn_seed(generator: torch.Generator) -> int:
    """A seed drawn from a generator, so that `torch.manual_seed` repeats what comes of it."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


class StepNoise:
    """The noise of one call, row by row and step by step.

    Rows advance at their own pace. The noise that a row has still to pass is kept, within a budget. Of steps beyond it
    the generator's state is kept, and they are drawn again when a row gets there.

    Args:
        batch_size (`int`): Rows that plain generation would draw for (B).
        vocab_size (`int`): Scores of a token (V).
        device (`torch.device`): Where tokens are drawn.
        num_steps (`int`, *optional*): At which the text is full: behind it nothing is drawn, and any noise will do.
        max_bytes (`int`, *optional*, defaults to 256 MiB): Most memory to keep noise in.
    """

    def __init__(
        self,
        batch_size: int,
        vocab_size: int,
        device: torch.device,
        num_steps: int | None = None,
        max_bytes: int = MAX_BYTES,
    ):
        self._shape = (batch_size, vocab_size)
        self._device = device
        if num_steps is None:
            self._num_steps = sys.maxsize
        else:
            self._num_steps = num_steps
        self._behind = torch.ones(vocab_size, dtype=torch.float32, device=device)
        self._call = CallGenerator(device)
        self._again = torch.Generator(device)
        self._states: dict[int, torch.Tensor] = {}  # before each step, from that of the last row on
        self._num_drawn = 0
        self._kept: dict[int, dict[int, torch.Tensor]] = {row: {} for row in range(batch_size)}  # row, step: [V]
        self._room = max_bytes // (4 * vocab_size)  # how many more of those may be kept

    def ahead(self, rows: Sequence[int], steps: Sequence[int], count: int) -> torch.Tensor:
        """The noise of the next steps of some rows; no row may go back, and none that is left out may come again.

        Args:
            rows (`Sequence[int]`): R rows of the batch.
            steps (`Sequence[int]`): The first step wanted of each.
            count (`int`): How many steps of each (N).

        Returns:
            `torch.Tensor`: `[R, N, V]` in fp32, on the device.
        """
        self._pass(dict(zip(rows, steps, strict=True)))
        unkept: dict[tuple[int, int], torch.Tensor] = {}
        for step in range(min(steps), min(max(steps) + count, self._num_steps)):
            firsts = zip(rows, steps, strict=True)
            lacking = {row: first for row, first in firsts if first <= step and step not in self._kept[row]}
            if step < self._num_drawn and not any(step < first + count for first in lacking.values()):
                continue
            noise = self._draw(step)
            for row, first in lacking.items():
                if self._room:
                    self._room -= 1
                    self._kept[row][step] = _row_of(noise, row)
                elif step < first + count:
                    unkept[row, step] = _row_of(noise, row)
        found = [
            self._kept[row].get(step, unkept.get((row, step), self._behind))
            for row, first in zip(rows, steps, strict=True)
            for step in range(first, first + count)
        ]
        return torch.stack(found).view(len(rows), count, -1)

    def end(self, num_steps: int) -> None:
        """Leave the default generator where plain generation would have left it after this many steps."""
        is_last = num_steps >= self._num_drawn
        self._call.give_back(self._call.generator.get_state() if is_last else self._states[num_steps])

    def _draw(self, step: int) -> torch.Tensor:
        """The noise `[B, V]` of the next step, or of an earlier one again."""
        generator = self._call.generator
        if step == self._num_drawn:
            self._states[step] = generator.get_state()
            self._num_drawn += 1
        else:
            generator = self._again
            generator.set_state(self._states[step])
        noise = torch.empty(self._shape, dtype=torch.float32, device=self._device)
        return noise.exponential_(generator=generator)

    def _pass(self, firsts: dict[int, int]) -> None:
        """Forget what no row will need again, given the first step that each needs now."""
        for row in [row for row in self._kept if row not in firsts]:
            self._room += len(self._kept.pop(row))
        for row, first in firsts.items():
            for step in [step for step in self._kept[row] if step < first]:
                del self._kept[row][step]
                self._room += 1
        needed = min(firsts.values())
        for step in [step for step in self._states if step < needed]:
            del self._states[step]


def _row_of(noise: torch.Tensor, row: int) -> torch.Tensor:
    """One row `[V]`, without keeping the others' memory."""
    return noise[row].clone() if len(noise) > 1 else noise[row]

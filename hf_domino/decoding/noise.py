"""The noise of sampling. The noise of every decode step is drawn once, in order, exactly as plain `generate` draws it.

To draw one token, `torch.multinomial(probs, 1)` computes argmax(probs / E), where E is standard exponential noise. For
each step it draws one tensor `[B, V]` from the default generator, including sequences that have ended. So a token is a
function of its scores and of the noise of its step. Drafts are chosen with the noise of the steps that they are for,
and they never change which noise a step gets (arXiv 2408.07978).

Drafting needs the noise of future steps, and at the end of a call, the generator must return to where plain `generate`
would have left it. If the call drew from the default generator itself, then code that runs at the same time could draw
the same numbers. So a call draws from a copy of the generator. Meanwhile, the default generator continues from a seed
that nothing else uses. At the end of the call, it is set to the state that plain `generate` would have left.

Several steps are never drawn as one tensor, because that gives other numbers on a GPU, and on a CPU with MKL.

Shapes: B sequences of the batch, R unfinished sequences, N steps, V vocabulary.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Sequence

import torch
from transformers.utils import logging

from hf_domino._common.forks import Lock, in_child

logger = logging.get_logger(__name__)

MAX_BYTES = 2**28  # memory for noise; noise that does not fit is drawn again

_lock = Lock()
_borrowers: dict[torch.Generator, CallGenerator] = {}  # the call that has borrowed each default generator
in_child(_borrowers.clear)  # because the parent's calls will never give a generator back in a forked process


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that `torch.multinomial` draws from on a device; None if its final state cannot be predicted.

    It cannot be predicted on MPS, where plain generation stops one step late and draws once more.
    """
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    if generators:
        return generators[module.current_device() if device.index is None else device.index]
    return None


class CallGenerator:
    """The generator of one call, which draws the numbers that the default generator would have drawn.

    A call that starts while another one is running gets a seed of its own instead. Plain calls that run at the same
    time would not draw reproducible numbers either.

    Args:
        device (`torch.device`): The device that tokens are drawn on.
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
        """Whether the default generator is free to borrow."""
        # It is free if no call has borrowed it. It is also free if a call of this thread has borrowed it but it was
        # seeded since, because that call was abandoned.
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
        """Set the default generator to this state, if this call borrowed it and nobody has seeded it since."""
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
    """A seed that is drawn from a generator, so that results can be reproduced with `torch.manual_seed`."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


class StepNoise:
    """The noise of one call, for every sequence and every decode step.

    Sequences advance at their own pace. Noise that has been drawn and that a sequence still needs is kept, within a
    memory budget. For noise beyond the budget, only the generator's state is kept, and the noise is drawn again when a
    sequence reaches its step.

    Args:
        batch_size (`int`): Number of sequences that plain generation would draw for (B).
        vocab_size (`int`): Number of scores per position (V).
        device (`torch.device`): The device that tokens are drawn on.
        num_steps (`int`, *optional*): The step at which the length limit is reached. From there on, nothing is drawn,
            because no such token is kept, and constant noise is returned. Defaults to no limit.
        max_bytes (`int`, *optional*, defaults to 256 MiB): Maximum memory for noise.
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
        self._states: dict[int, torch.Tensor] = {}  # generator state before each step that a sequence may still need
        self._num_drawn = 0  # how many steps have been drawn
        self._kept: dict[int, dict[int, torch.Tensor]] = {row: {} for row in range(batch_size)}  # row, step: [V]
        self._room = max_bytes // (4 * vocab_size)  # how many more tensors [V] fit into the budget

    def ahead(self, rows: Sequence[int], steps: Sequence[int], count: int) -> torch.Tensor:
        """The noise of the next steps of some sequences.

        A sequence must never go back to an earlier step, and a sequence that was left out once must not return.

        Args:
            rows (`Sequence[int]`): Indices of R sequences of the batch.
            steps (`Sequence[int]`): The first step of each.
            count (`int`): The number of steps of each (N).

        Returns:
            `torch.Tensor`: Noise `[R, N, V]` in fp32, on the device.
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
        """Draw the noise `[B, V]` of the next step, or that of an earlier step again."""
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
        """Drop the noise and states that no sequence needs any more, given the first step that each needs now."""
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
    """Take one sequence's noise `[V]`, without keeping the memory of the others alive."""
    return noise[row].clone() if len(noise) > 1 else noise[row]

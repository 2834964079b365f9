"""A generator of a call's own, which goes on from the default one and leaves it where plain `generate` would have.

Drafting draws ahead, and what was drawn in vain has to be taken back. Were that done to the default generator itself,
what runs beside the call would see the same numbers. So a call draws from a copy. Meanwhile the default one goes on
from a seed nobody else has, and at the end it gets the state that it is owed.
"""

from __future__ import annotations

import hashlib
import threading

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

_lock = threading.Lock()
_borrowers: dict[torch.Generator, CallGenerator] = {}  # by the default generator that a call has copied


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that `torch.multinomial` draws from on a device; None where its state does not tell the text.

    That is so on MPS, where plain generation stops a step late and draws once more.
    """
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return generators[module.current_device() if device.index is None else device.index] if generators else None


class CallGenerator:
    """The numbers of one call: those the default generator would have given it.

    A call that starts while another one runs has a seed of its own instead: what plain calls side by side are given is
    by chance too.

    Args:
        device (`torch.device`): Where tokens are drawn.
        is_watching (`bool`, *optional*, defaults to `True`): Whether to say if something else draws meanwhile.
    """

    def __init__(self, device: torch.device, is_watching: bool = True):
        self.generator, self._is_watching = torch.Generator(device), is_watching
        self._default, self._thread = default_generator(device), threading.get_ident()
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
        _borrowers[default], start = self, default.get_state()
        self.generator.set_state(start)
        default.manual_seed(_seed(start))
        self._left_at, self._left_seed = default.get_state(), default.initial_seed()

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
        if has_moved and self._is_watching:
            logger.warning_once(
                "Something drew from torch's default generator while hf_domino generated: a logits processor, a "
                "stopping criterion, a streamer or another thread. The text follows the target's law, but is not the "
                "one that plain generation writes from the same seed. Draw from a torch.Generator of your own there."
            )


def _seed(state: torch.Tensor) -> int:
    """A seed that depends on a generator's state."""
    return int.from_bytes(hashlib.blake2b(state.numpy().tobytes(), digest_size=7).digest(), "little")


def _drawn_seed(generator: torch.Generator) -> int:
    """A seed drawn from a generator, so that `torch.manual_seed` repeats what comes of it."""
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))

"""A generator of a call's own, which goes on from the default one and leaves it where plain `generate` would have.

Drafting draws ahead, and what was drawn in vain has to be taken back. Were that done to the default generator itself,
what runs beside the call would see the same numbers. So a call draws from a copy. Meanwhile the default one goes on
from a seed nobody else has, and at the end it gets the state that it is owed.
"""

from __future__ import annotations

import hashlib
import itertools
import threading

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

_lock = threading.Lock()
_borrowed: set[torch.Generator] = set()  # default generators that a call has copied
_seeds = itertools.count(1)


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
        self._default = default_generator(device)
        self._is_owing = False
        with _lock:
            if self._default is None:  # a seed from the CPU's, so that `torch.manual_seed` repeats the text
                self.generator.manual_seed(int(torch.randint(2**62, ())))
            elif self._default in _borrowed:
                self.generator.manual_seed(_seed(self._default.get_state(), next(_seeds)))
            else:
                self._is_owing = True
                _borrowed.add(self._default)
                start = self._default.get_state()
                self.generator.set_state(start)
                self._default.manual_seed(_seed(start))
                self._left_at = self._default.get_state()

    def give_back(self, state: torch.Tensor) -> None:
        """Set the default generator to this state, if it is owed one."""
        if not self._is_owing:
            return
        assert self._default is not None
        with _lock:
            self._is_owing = False
            has_moved = not torch.equal(self._default.get_state(), self._left_at)
            self._default.set_state(state)
            _borrowed.discard(self._default)
        if has_moved and self._is_watching:
            logger.warning_once(
                "Something drew from torch's default generator while hf_domino generated: a logits processor, a "
                "stopping criterion, a streamer or another thread. The text follows the target's law, but is not the "
                "one that plain generation writes from the same seed. Draw from a torch.Generator of your own there."
            )


def _seed(state: torch.Tensor, number: int = 0) -> int:
    """A seed that depends on a generator's state, and on a number."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=7, salt=number.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little")

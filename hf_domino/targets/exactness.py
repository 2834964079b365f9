"""Whether a block of positions has the same bits as plain decode steps: one measurement, and one word for the user.

Shapes: N positions of the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_domino._common.cache_name import CACHE
from hf_domino.targets.packed import packed_linears
from hf_domino.targets.view import input_device

EQUAL = "equal bit for bit"
EQUAL_TO_PACKED = "equal to plain with packed weights"
UP_TO_ROUNDING = "up to rounding"

Outputs = dict[str, list[torch.Tensor]]  # of each module, in the order of the forward


@dataclass(frozen=True)
class Exactness:
    """How the logits of a block compare with those of plain decode steps.

    Args:
        word (`str`): `EQUAL`, `EQUAL_TO_PACKED` or `UP_TO_ROUNDING`.
        module (`str`, *optional*): The first module whose outputs differ between a block and plain decode steps with
            packed weights, if the word is `UP_TO_ROUNDING`.
    """

    word: str
    module: str | None = None

    def __str__(self) -> str:
        """Say the word and its reason."""
        if self.word == EQUAL:
            return f"{self.word}: blocks have the logits of plain decode steps"
        if self.word == EQUAL_TO_PACKED:
            return f"{self.word}: plain generate() differs by the rounding of hf_domino.packed_linears() alone"
        return (
            f"{self.word}: a block rounds differently from plain decode steps, first in {self.module or 'the logits'}"
        )


@torch.no_grad()
def measure_exactness(target: PreTrainedModel, num_positions: int = 9, num_cached: int = 70) -> Exactness:
    """Compare the logits of one block with those of as many plain decode steps, bit by bit.

    Args:
        target (`PreTrainedModel`): The target.
        num_positions (`int`, *optional*, defaults to 9): Positions of the block.
        num_cached (`int`, *optional*, defaults to 70): Positions before it.
    """
    random = torch.Generator().manual_seed(0)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(vocab_size, (1, num_cached + num_positions), generator=random).to(input_device(target))
    plain, _ = _logits(target, ids, num_cached, [1] * num_positions)
    with packed_linears(target):
        steps, by_step = _logits(target, ids, num_cached, [1] * num_positions)
        block, by_block = _logits(target, ids, num_cached, [num_positions])
    if torch.equal(block, plain):
        return Exactness(EQUAL)
    if torch.equal(block, steps):
        return Exactness(EQUAL_TO_PACKED)
    differing = (name for name, outputs in by_block.items() if not _are_equal(outputs, by_step.get(name, [])))
    return Exactness(UP_TO_ROUNDING, next(differing, None))


def _logits(target: PreTrainedModel, ids: torch.Tensor, start: int, widths: list[int]) -> tuple[torch.Tensor, Outputs]:
    """Return logits `[1, N, V]` of forwards of these widths after the first positions, and what modules returned."""
    cache = DynamicCache(config=target.config)
    target(ids[:, :start], **{CACHE: cache})
    found = []
    outputs: Outputs = {}
    with _recorded(target, outputs):
        for width in widths:
            found.append(target(ids[:, start : start + width], **{CACHE: cache}).logits)
            start += width
    return torch.cat(found, dim=1), outputs


@contextmanager
def _recorded(target: PreTrainedModel, outputs: Outputs) -> Iterator[None]:
    def recorder(name: str) -> Callable[..., None]:
        def record(_module: object, _inputs: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, torch.Tensor):
                outputs.setdefault(name, []).append(value)

        return record

    handles = [module.register_forward_hook(recorder(name)) for name, module in target.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _are_equal(of_block: list[torch.Tensor], of_steps: list[torch.Tensor]) -> bool:
    """Whether a module's outputs are the same; True if their positions cannot be told."""
    whole = of_block[0]
    for axis in range(-2, -whole.dim() - 1, -1):
        one = list(whole.shape)
        one[axis] = 1
        is_whole = len(of_block) == 1 and of_steps and whole.shape[axis] == len(of_steps)
        if is_whole and all(list(step.shape) == one for step in of_steps):
            return torch.equal(torch.cat(of_steps, dim=axis), whole)
    return True

"""Workspaces: the fixed-shape buffers and captured graphs of a target and a drafter, kept from one call to the next.

A workspace is the executor of rounds of fixed shape. It pads the number of sequences to a power of two, so that only a
few shapes are captured while the sequences of a batch end one by one.

Capturing takes seconds, so a call takes the workspace that an earlier call left, if its text fits, and gives it back at
the end. Calls never share a workspace: calls in several threads each make their own, and the last one given back is
kept. It is dropped together with the target or the drafter, and is not taken again after weights have moved.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map_only, tree_unflatten
from transformers import Cache, PreTrainedModel
from transformers.utils import output_capturing

from hf_domino._common.forks import Lock
from hf_domino._common.notices import logger
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.static.fixed_cache import FixedCache, compact
from hf_domino.decoding.static.fixed_context import FixedContext
from hf_domino.decoding.static.graphs import StageGraphs
from hf_domino.decoding.tree import Tree
from hf_domino.decoding.verification import Verification
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.named import release_named
from hf_domino.targets.packed import release_packed
from hf_domino.targets.view import TargetModel, has_hooks

CAPACITY_STEP = 64  # capacities are multiples of it, so that texts of nearly the same length share graphs
LEAST_CAPACITY = 512  # on a GPU, where less saves no time
KEPT_SHARE = 1 / 8  # of a GPU's memory: buffers that take more are freed after the call, and their graphs with them
# Buffers with at least this many times the slots that a call used are too large for it. After a few such calls in a row
# they are freed, because attention reads all slots. New graphs take seconds, so one call alone is no reason.
TOO_LARGE = 4
PATIENCE = 8

# What a layer with PEFT adapters depends on besides weights: which adapters are active, whether they are disabled,
# which are merged, and their scaling.
OF_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")

register_pytree_node(
    Tree, lambda tree: ([tree.tokens, tree.parents, tree.longest], None), lambda fields, _: Tree(*fields)
)
register_pytree_node(
    Verification,
    lambda found: ([found.scores, found.decided, found.path], None),
    lambda fields, _: Verification(*fields),
)

_lock = Lock()
_idle: weakref.WeakKeyDictionary[PreTrainedModel, weakref.WeakKeyDictionary[DominoDraftModel, Workspace]] = (
    weakref.WeakKeyDictionary()
)


class Workspace(Executor):
    """Buffers and graphs for one call at a time; captures the functions of a round if the device supports it.

    A workspace does not keep the models alive: graphs hold the addresses of weights, but no modules.

    Args:
        like (`Cache`): A static cache, which gives the types of the target's layers.
        drafter ([`DominoDraftModel`]): Gives the shapes of its context.
        capacity (`int`): Positions of both caches.
        num_rows (`int`): Sequences of both caches, a power of two.
        device (`torch.device`): Where the target is.
        state (`Hashable`): What the graphs depend on besides shapes; see `_state`.
    """

    def __init__(
        self,
        like: Cache,
        drafter: DominoDraftModel,
        capacity: int,
        num_rows: int,
        device: torch.device,
        state: Hashable = None,
    ):
        super().__init__()
        self.capacity = capacity
        self.num_rows = num_rows
        self.device = device
        self.state = state
        self.cache = FixedCache(like, capacity, device, num_rows)
        self.context = FixedContext(drafter, capacity, num_rows)
        # A graph belongs to one device, so nothing is captured if target and drafter are on different ones.
        self.graphs = StageGraphs(device, enabled=None if drafter.device == device else False)
        self.num_used = 0  # positions that the current call has needed so far
        self.num_rows_used = 1
        self._num_small_calls = 0  # the last calls for which the buffers were too large
        self.min_batch_size = 1  # functions run on at least this many, so that only one batch size is compiled
        self._held: dict[str, torch.Tensor] = {}

    is_fixed = True
    context: FixedContext

    @property
    def is_compiled(self) -> bool:  # type: ignore[override]
        """Whether stages of the current call are compiled; blocks and batches are then padded to one size."""
        return self.graphs.options is not None

    @property
    def num_prepared(self) -> int:  # type: ignore[override]
        """How many stages have been captured or compiled so far."""
        return self.graphs.num_prepared

    def clear(self) -> None:
        """Start a new text."""
        self.cache.clear()
        self.context.clear()

    def run(self, function: Callable[..., Any], *inputs: Any, key: Hashable = ()) -> Any:
        """Run a function on the sequences that are still generated, padded to a power of two of sequences.

        A captured function has fixed shapes and reads nothing back to the host. So a function is called directly if its
        distribution reads values back or calls a function of the caller.

        Args:
            function (`Callable`): Takes and returns tensors whose first dimension is that of sequences.
            inputs: Tensors of B sequences each; prefixes, which are packed into one tensor; a distribution, which is
                identified by its key; and other hashable values, which become part of the captured function's key.
                Padding sequences read and write rows of the buffers whose sequences have ended, and their results are
                ignored.
            key (`Hashable`, *optional*): What else the function's launches depend on.

        Returns:
            What the function returns for the B sequences; valid until its next run.
        """
        if all(isinstance(each, torch.Tensor) for each in inputs):  # such a function can be compiled
            return self._run_padded((function.__name__, key), function, list(inputs))
        leaves, form = tree_flatten(inputs)
        distribution = next((leaf for leaf in leaves if isinstance(leaf, TokenDistribution)), None)
        key_of_distribution = None if distribution is None else distribution.key
        if distribution is not None and key_of_distribution is None:
            return function(*inputs)
        reads_text = distribution is not None and distribution.needs_prefix
        keys: list[Hashable] = [function.__name__, key]
        tensors = list[torch.Tensor]()
        for leaf in leaves:
            if isinstance(leaf, Prefixes):
                leaf = leaf.packed(self.capacity) if reads_text else leaf.last()
            if isinstance(leaf, torch.Tensor):
                tensors.append(leaf)
                keys.append(torch.Tensor)
            else:
                keys.append(key_of_distribution if leaf is distribution else leaf)

        def of_tensors(*tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            filled = [_rebuild_input(leaf, given, reads_text) for leaf in leaves]
            return function(*tree_unflatten(filled, form))

        return self._run_padded(tuple(keys), of_tensors, tensors)

    def _run_padded(self, key: Hashable, function: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
        """Run a function of tensors, padded to a power of two of sequences by repeating the first one."""
        num_rows = len(tensors[0])
        missing = bucket_of(max(num_rows, self.min_batch_size)) - num_rows
        if missing:
            tensors = [torch.cat((tensor, tensor[:1].expand(missing, *tensor.shape[1:]))) for tensor in tensors]
        found = self.graphs(key, function, *tensors)
        # Rebuild the result even without padding: a tree caches what it derives from its tensors, which the next run
        # overwrites.
        return tree_map_only(torch.Tensor, lambda tensor: tensor[:num_rows], found)

    def hold(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy what is fixed for a text to where graphs find it; returns the tensor at that address.

        Args:
            name (`str`): Any name that identifies it.
            values (`torch.Tensor`): What to copy. If its shape or dtype differs from before, all graphs are dropped.
        """
        held = self._held.get(name)
        if held is None or held.shape != values.shape or held.dtype != values.dtype:
            if held is not None:  # graphs use its address
                self.graphs.clear()
            with torch.inference_mode(False):
                held = self._held[name] = torch.empty(values.shape, dtype=values.dtype, device=values.device)
        held.copy_(values)
        return held

    def hold_for_each(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Hold one number for each sequence, `[..., B, 1]`, padded to as many sequences as the buffers have."""
        missing = self.num_rows - values.shape[-2]
        return self.hold(name, torch.nn.functional.pad(values, (0, 0, 0, missing)))

    def select(self, values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Move these sequences to the front, in place."""
        compact([values], rows, dim=values.dim() - 2)
        return values

    def hold_on_device(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Copy values like [`~Workspace.hold`], to the target's device."""
        return self.hold(name, values.to(self.device))

    def reserve(self, num_positions: int, most: int) -> bool:
        """Make room for a text of so many positions, and return whether the buffers moved, which drops all graphs.

        The capacity doubles, because every change costs new graphs. If that takes more memory than there is, it grows
        by a step.

        Args:
            num_positions (`int`): Positions needed now.
            most (`int`): Positions that the text can have in the end.
        """
        self.num_used = max(self.num_used, num_positions)
        if num_positions <= self.capacity:
            return False
        before = self.capacity
        self.graphs.clear()
        for wanted in (min(max(num_positions, 2 * before), max(most, num_positions)), num_positions):
            try:
                self._resize(capacity_for(wanted, self.device))
                return True
            except torch.OutOfMemoryError:
                self._resize(before)
                if wanted == num_positions:
                    raise
                free_memory(self.device)
        raise AssertionError("the last try returns or raises")

    def _resize(self, capacity: int) -> None:
        self.cache.resize(capacity)
        self.context.resize(capacity)
        self.capacity = capacity

    def fits(self, state: Hashable, device: torch.device, num_positions: int, num_rows: int) -> bool:
        """Whether a call with this state can take the workspace for so many positions and sequences."""
        if (self.state, self.device) != (state, device) or self.capacity < num_positions or self.num_rows < num_rows:
            return False
        # If nothing would have to be captured again, a call gets buffers of its own size.
        return self.num_prepared > 0 or self.num_slots == capacity_for(num_positions, device) * num_rows

    def release(self, target: PreTrainedModel, drafter: DominoDraftModel) -> None:
        """Leave the workspace to the next call; an interrupted call does not do this, nor one with large buffers."""
        num_slots = capacity_for(self.num_used, self.device) * self.num_rows_used
        if num_slots * TOO_LARGE <= self.num_slots and not self.is_compiled:  # compiling takes minutes
            self._num_small_calls += 1
        else:
            self._num_small_calls = 0
        if self._takes_much() or self._num_small_calls == PATIENCE:
            return
        with _lock:
            _idle.setdefault(target, weakref.WeakKeyDictionary())[drafter] = self

    @property
    def num_slots(self) -> int:
        """The slots of all sequences."""
        return self.capacity * self.num_rows

    def _takes_much(self) -> bool:
        """Whether the buffers take so much of a GPU's memory that other work would miss it between calls."""
        if self.device.type != "cuda":
            return False
        total = torch.cuda.get_device_properties(self.device).total_memory
        return self.cache.num_bytes() + self.context.num_bytes() > KEPT_SHARE * total


def _rebuild_input(leaf: Any, tensors: Iterator[torch.Tensor], reads_text: bool) -> Any:
    """Rebuild one input of a captured function, taking tensors and prefixes from the next of `tensors`."""
    if isinstance(leaf, torch.Tensor):
        return next(tensors)
    if isinstance(leaf, Prefixes):
        if reads_text:
            return Prefixes.unpacked(next(tensors))
        return Prefixes.of(next(tensors))
    return leaf


def take_workspace(
    target: PreTrainedModel,
    drafter: DominoDraftModel,
    like: Cache,
    num_positions: int,
    num_rows: int,
    device: torch.device,
) -> Workspace:
    """Return a cleared workspace for texts of at most `num_positions`, an earlier call's if it fits.

    Args:
        target (`PreTrainedModel`): The target.
        drafter ([`DominoDraftModel`]): The drafter.
        like (`Cache`): The static cache that `generate` has prepared.
        num_positions (`int`): Positions needed, including those of a last rejected block.
        num_rows (`int`): Sequences needed.
        device (`torch.device`): Where the target is.
    """
    state = _state(target, drafter)
    with _lock:
        found = _idle.get(target, {}).pop(drafter, None)
    capacity = capacity_for(num_positions, device)
    num_rows = bucket_of(num_rows)
    if found is not None and not found.fits(state, device, num_positions, num_rows):
        found = None  # frees its memory before the new one is allocated
    if found is None:
        if device.type == "cuda":
            logger.info(
                "hf_domino captures CUDA graphs for texts of up to %d tokens; later calls with these models use them.",
                capacity,
            )
        found = Workspace(like, drafter, capacity, num_rows, device, state)
    else:
        found.clear()
    found.num_used = num_positions
    found.num_rows_used = num_rows
    return found


def capacity_for(num_positions: int, device: torch.device) -> int:
    """Round up the number of positions, on a GPU to few different numbers, so that later calls can reuse workspaces.

    Args:
        num_positions (`int`): Positions that a call needs.
        device (`torch.device`): Where the target is.

    Example:
    ```python
    >>> import torch
    >>> from hf_domino.decoding.static.workspace import capacity_for
    >>> [capacity_for(count, torch.device("cuda")) for count in (40, 600, 1030)]
    [512, 640, 1280]

    ```
    """
    step = CAPACITY_STEP
    if device.type == "cuda":
        num_positions = max(num_positions, LEAST_CAPACITY)
        step = max(step, 1 << ((num_positions - 1).bit_length() - 3))  # an eighth to a quarter of `num_positions`
    return -(-num_positions // step) * step


def free_memory(device: torch.device) -> None:
    """Free what idle workspaces hold, and what torch keeps of a GPU's memory for later."""
    _release_buffers()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def bucket_of(num_rows: int) -> int:
    """Round the number of sequences up to a power of two."""
    return 1 << (num_rows - 1).bit_length()


def release_workspaces() -> None:
    """Free what calls left for later ones: packed weights, drafters that were loaded by name, and with fixed shapes
    buffers, graphs and compiled stages.

    Example:
    ```python
    >>> import hf_domino
    >>> hf_domino.release_workspaces()

    ```
    """
    _release_buffers()
    release_named()


def _release_buffers() -> None:
    with _lock:
        _idle.clear()
    release_packed()


def _state(target: PreTrainedModel, drafter: DominoDraftModel) -> Hashable:
    """Collect what a captured graph depends on, except tensors' contents: addresses, and options of both models."""
    config = drafter.config
    found: list[Any] = [config.to_json_string(use_diff=False), drafter.vocabulary.prepare(TargetModel(target))]
    found += _kernels()
    for model in (target, drafter):
        found += [model.training, getattr(model.config, "_attn_implementation", None)]
        todo: list[nn.Module] = [model]  # walks once; `modules()` and `parameters()` would walk four times
        while todo:
            part = todo.pop()
            todo.extend(child for child in part._modules.values() if child is not None)  # an empty module is falsy
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    found.append((tensor.data_ptr(), tensor.dtype, tensor.requires_grad))
            if has_hooks(part):
                found += _hooks(part)
            if (forward := part.__dict__.get("forward")) is not None:  # as of a model that accelerate prepared
                # A reference, because a function can hold its module. A dead one equals no other.
                found.append(weakref.ref(getattr(forward, "__func__", forward)))
            if hasattr(part, "merged_adapters"):
                found.append(repr([getattr(part, name, None) for name in OF_ADAPTERS]))
    return tuple(found)


def _kernels() -> list[Hashable]:
    """Return the settings by which torch chooses the kernels of products and of attention on a GPU."""
    cuda = torch.backends.cuda
    attention = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled)
    return [
        cuda.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        *(is_enabled() for is_enabled in attention),
    ]


def _hooks(module: nn.Module) -> list[int]:
    """Return ids of a module's hooks, which are part of what was captured or traced; ids are never reused."""
    found = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    # Leave out Transformers' own hooks: the first forward that returns hidden states adds them.
    return [key for key, hook in found if getattr(hook, "__module__", None) != output_capturing.__name__]

"""Stages of a round as CUDA graphs: captured once, then launched as one.

A stage is a function of tensors whose shapes never change. What else it reads or writes (weights, caches) keeps its
address, and it can be run again without harm: it writes only where nothing is valid yet. Without a GPU a stage is
simply called. Either way it may have been compiled before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import logging

from hf_domino.decoding.static.compiling import CompiledStage, Stage, StageCompiler, signature

logger = logging.get_logger(__name__)

WARM_UPS = 2  # runs before a capture: libraries pick their kernels and allocate their workspaces
MAX_GRAPHS = 64  # of one workspace; calls that vary a sampling parameter would add some each

_using_graphs: ContextVar[bool] = ContextVar("using_graphs", default=True)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Launch every stage kernel by kernel inside the `with` block, also where graphs are there."""
    token = _using_graphs.set(False)
    try:
        yield
    finally:
        _using_graphs.reset(token)


class StageGraphs:
    """Runs stages, on a CUDA device each as a graph that is captured at its first use.

    All graphs share one memory pool: they run one after the other. What a stage returned is overwritten by its next
    run. A capture synchronises and takes a while; replays do neither.

    Args:
        device (`torch.device`): Where the stages run.
        enabled (`bool`, *optional*): Whether to capture; defaults to whether `device` is a CUDA device.
    """

    def __init__(self, device: torch.device, enabled: bool | None = None):
        self.device = device
        self.enabled = device.type == "cuda" if enabled is None else enabled
        self.compiler = StageCompiler()
        self._graphs: dict[Hashable, StageGraph | None] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, stage: Stage, *inputs: torch.Tensor) -> Any:
        """Run a stage.

        Args:
            key (`Hashable`): Its name and whatever its launches depend on beside the inputs' shapes. A stage with a
                known key is not called again: its graph is replayed.
            stage (`Callable`): Takes and returns tensors.
            inputs (`torch.Tensor`): Copied to where the graph reads them.

        Returns:
            What the stage returns; valid until its next run.
        """
        if (compiled := self.compiler.compiled(key, stage, inputs)) is not None:
            try:
                return self._run(compiled.key, compiled, inputs)
            except Exception as error:  # if it is the stage's own, the stage raises it once more
                self.compiler.give_up(compiled, inputs, error)
        return self._run(key, stage, inputs)

    def _run(self, key: Hashable, stage: Stage, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Replay the stage's graph, captured where there is none; call it where nothing is captured."""
        if not (self.enabled and _using_graphs.get()):
            return stage(*inputs)
        found = signature(key, inputs)
        if found not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                self.clear()
            self._graphs[found] = self._try_capture(key, stage, inputs)
        graph = self._graphs[found]
        return stage(*inputs) if graph is None else graph.replay(inputs)

    def _try_capture(self, key: Hashable, stage: Stage, inputs: tuple[torch.Tensor, ...]) -> StageGraph | None:
        """A graph, or None with a warning where the model's own code synchronises: that stage is launched as ever.

        Raises:
            RuntimeError: For a compiled stage, of which there is another to try.
        """
        try:
            # Buffers made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                return self.capture(stage, inputs)
        except RuntimeError as error:
            if isinstance(stage, CompiledStage):
                raise
            name = key[0] if isinstance(key, tuple) else key
            reason = str(error).partition("\n")[0]
            logger.warning(
                "hf_domino runs the stage %r without a CUDA graph, as it cannot be captured: %s", name, reason
            )
            return None

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()
        self._pool = None

    def capture(self, stage: Stage, inputs: tuple[torch.Tensor, ...]) -> StageGraph:
        """Capture a stage.

        The random state is left as it was before the warm-ups, so that draws are those of a run without graphs.

        Args:
            stage (`Callable`): Takes and returns tensors.
            inputs (`tuple[torch.Tensor]`): Of the shapes it will be replayed with.
        """
        buffers = tuple(tensor.clone() for tensor in inputs)
        with torch.cuda.device(self.device):
            random_state, stream = torch.cuda.get_rng_state(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(stream):
                    for _ in range(WARM_UPS):
                        stage(*buffers)
            finally:
                torch.cuda.current_stream().wait_stream(stream)
                torch.cuda.set_rng_state(random_state)
            # The workspace of a product lies in the graphs' pool if it is made in a capture. Transformers' own compiled
            # generation frees all others, to which a graph would then write.
            torch._C._cuda_clearCublasWorkspaces()
            graph = torch.cuda.CUDAGraph()
            # Other threads may launch and allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                outputs = stage(*buffers)
        self._pool = self._pool or graph.pool()
        return StageGraph(graph, buffers, outputs)


@dataclass(frozen=True)
class StageGraph:
    """A captured stage.

    Args:
        graph (`torch.cuda.CUDAGraph`): Its launches.
        inputs (`tuple[torch.Tensor]`): Where it reads its inputs.
        outputs (`Any`): Where it leaves what it returns.
    """

    graph: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: Any

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Run it on new inputs of the same shapes."""
        for buffer, tensor in zip(self.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self.graph.replay()
        return self.outputs

"""Stages of a round as CUDA graphs: captured once, then launched as one. They may have been compiled before.

A stage is a function of tensors whose shapes never change. What else it reads or writes (weights, caches) keeps its
address, and it can be run again without harm: it writes only where nothing is valid yet. Without a GPU a stage is
simply called.

The stages of many small kernels, the verification forward and the backbone, are compiled where Transformers compiles
plain generation: for calls that ask for `cache_implementation="static"` on a GPU, or give a `compile_config`. Then
blocks and batches are filled up, so that each of the two is compiled once, and a graph captures what was compiled.
Each is compiled from a code object of its own: dynamo keeps what it traced, and counts how often, by code object. So
widths do not use up each other's limit, and what was traced goes with the workspace, before which a hook or an adapter
would not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

WARM_UPS = 2  # runs before a capture: libraries pick their kernels and allocate their workspaces
MAX_GRAPHS = MAX_COMPILED = 64  # of one workspace; calls that vary a sampling parameter would add some each
COMPILED = ("target_forward", "backbone")  # the correction cannot be traced, and acceptance is a few kernels
# Graphs are captured here, and never inside one another.
MODES = {"default": None, "reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
MAKES_GRAPHS = "triton.cudagraphs"  # an option of inductor

Stage = Callable[..., Any]  # of tensors; gives tensors, or something that holds some
_using_graphs: ContextVar[bool] = ContextVar("using_graphs", default=True)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Launch every stage kernel by kernel inside the `with` block, also where graphs are there."""
    token = _using_graphs.set(False)
    try:
        yield
    finally:
        _using_graphs.reset(token)


def compile_options(target: PreTrainedModel, config: GenerationConfig) -> dict[str, Any] | None:
    """Arguments of `torch.compile` for a call's stages; None where it asks for nothing, or gets nothing.

    As in Transformers, a static cache alone asks for it on a GPU.

    Args:
        target (`PreTrainedModel`): The target.
        config (`GenerationConfig`): The merged configuration of the call.

    Raises:
        RuntimeError: torch's, for a backend, a mode or options it does not know.
    """
    is_static = config.cache_implementation == "static"
    asked = config.compile_config
    if asked is None and is_static and target.device.type == "cuda":
        asked = CompileConfig()
    if asked is None or config.disable_compile:
        return None
    if not is_static:
        logger.warning_once(
            "hf_domino compiles nothing without cache_implementation='static': compile_config is ignored."
        )
        return None
    quantizer = getattr(target, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        logger.warning_once(
            f"hf_domino compiles nothing of a target quantized by {type(quantizer).__name__}, as Transformers does "
            "not: compile_config is ignored."
        )
        return None
    options = {
        "backend": asked.backend,
        "fullgraph": asked.fullgraph,
        "dynamic": False,  # no shape of a stage changes
        "mode": MODES.get(asked.mode, asked.mode),
        "options": {name: value for name, value in sorted((asked.options or {}).items()) if name != MAKES_GRAPHS}
        or None,
    }
    _compiled(options)  # refused before any forward, if at all
    return options


def _compiled(options: dict[str, Any]) -> Stage:
    """A compiled function that runs a stage on inputs; it has traced nothing yet."""
    return torch.compile(FunctionType(_run.__code__.replace(), globals()), **options)


def _run(stage: Stage, *inputs: torch.Tensor) -> Any:
    """Run the traced stage: the stage is an argument, so that nothing that is kept holds a model."""
    return stage(*inputs)


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
        if enabled is None:
            self.enabled = device.type == "cuda"
        else:
            self.enabled = enabled
        self.options: dict[str, Any] | None = None  # to compile the stages of the call at hand with
        # By key, and by the shapes and dtypes of inputs; None where that has failed.
        self._compiled: dict[Hashable, Stage | None] = {}
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
        name = str(key[0] if isinstance(key, tuple) else key)
        found = (key, *((tensor.shape, tensor.dtype) for tensor in inputs))
        if self.options is not None and name in COMPILED:
            asked = (*found, repr(self.options))
            if asked not in self._compiled:
                if len(self._compiled) >= MAX_COMPILED:
                    self._compiled.clear()
                self._compiled[asked] = _compiled(self.options)
            if (compiled := self._compiled[asked]) is not None:
                # Two tensors of one shape may differ in the stride of an axis of length 1, which would be traced anew.
                alike = tuple(tensor.reshape(-1).view(tensor.shape) for tensor in inputs)
                try:
                    return self._run(name, asked, partial(compiled, stage), alike)
                except Exception as error:  # if it is the stage's own, the stage raises it once more
                    self._compiled[asked] = None
                    # Which backend failed is in the first line, and why in the second.
                    reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
                    logger.warning("hf_domino runs the stage %r without compiling it, as that failed: %s", name, reason)
        return self._run(name, found, stage, inputs)

    def _run(self, name: str, found: Hashable, stage: Stage, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Replay the stage's graph, captured where there is none; call it where nothing is captured."""
        if not (self.enabled and _using_graphs.get()):
            return stage(*inputs)
        if found not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS:
                self.clear()
            self._graphs[found] = self._try_capture(name, stage, inputs)
        graph = self._graphs[found]
        if graph is None:
            return stage(*inputs)
        return graph.replay(inputs)

    def _try_capture(self, name: str, stage: Stage, inputs: tuple[torch.Tensor, ...]) -> StageGraph | None:
        """A graph, or None with a warning where the model's own code synchronises: that stage is launched as ever."""
        try:
            # Buffers made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                return self.capture(stage, inputs)
        except RuntimeError as error:
            if isinstance(stage, partial):  # what was compiled: there is another to try
                raise
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
            random_state = torch.cuda.get_rng_state()
            stream = torch.cuda.Stream()
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

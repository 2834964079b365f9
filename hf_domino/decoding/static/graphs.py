"""Stages of a round as CUDA graphs: each is captured once and then launched as a whole. Some are compiled first.

A stage is a function of tensors whose shapes never change. Everything else that it reads or writes (weights, caches)
keeps its address. A stage can be run again without harm, because it writes only where nothing is valid yet. Without a
GPU, a stage is simply called.

The stages with many small kernels, the verification forward and the backbone, are compiled when Transformers compiles
plain generation: in calls with `cache_implementation="static"` that run on a GPU or pass a `compile_config`. Blocks and
batches are then padded so that each of the two stages is compiled only once, and a graph captures the compiled code.

Each stage is compiled from a code object of its own, because dynamo stores and counts traces per code object. So the
traces of different widths do not use up a common limit, and they are dropped with the workspace. A trace that lived
longer would miss a hook or an adapter that was added later.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from hf_domino._common.blocks import Setting

logger = logging.get_logger(__name__)

WARM_UPS = 2  # runs before a capture, in which libraries pick their kernels and allocate their workspaces
# Per workspace. A batch of eight has stages of 1, 2, 4 and 8 sequences, each for chains of a few lengths and, with
# token recycling, for trees of two sizes. That makes 160, and every new value of a sampling parameter adds some.
MAX_GRAPHS = 192
MAX_COMPILED = 64
COMPILED = ("target_forward", "backbone")  # the correction cannot be traced, and acceptance is only a few kernels
# This module captures the graphs, so inductor must not: captures cannot be nested.
MODES = {"default": None, "reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
MAKES_GRAPHS = "triton.cudagraphs"  # the option with which inductor captures graphs

Stage = Callable[..., Any]  # takes tensors; returns tensors, or an object that holds some
_using_graphs = Setting("using_graphs", default=True)


@contextmanager
def without_graphs() -> Iterator[None]:
    """Launch every stage kernel by kernel inside the `with` block, even if its graph exists."""
    with _using_graphs.within(False):
        yield


def compile_options(target: PreTrainedModel, config: GenerationConfig) -> dict[str, Any] | None:
    """Return the arguments of `torch.compile` for the stages of a call of fixed shape; None if they are not compiled.

    As in Transformers, a static cache on a GPU is enough to compile.

    Args:
        target (`PreTrainedModel`): The target.
        config (`GenerationConfig`): The merged configuration of the call.

    Raises:
        RuntimeError: If torch does not know the backend, the mode or an option.
    """
    compile_config = config.compile_config
    if compile_config is None and target.device.type == "cuda":
        compile_config = CompileConfig()
    if compile_config is None or config.disable_compile:
        return None
    quantizer = getattr(target, "hf_quantizer", None)
    if quantizer is not None and not quantizer.is_compileable:
        logger.warning_once(
            f"hf_domino compiles nothing of a target quantized by {type(quantizer).__name__}, as Transformers does "
            "not: compile_config is ignored."
        )
        return None
    options = {
        "backend": compile_config.backend,
        "fullgraph": compile_config.fullgraph,
        "dynamic": False,  # no shape of a stage changes
        "mode": MODES.get(compile_config.mode, compile_config.mode),
        "options": {
            name: value for name, value in sorted((compile_config.options or {}).items()) if name != MAKES_GRAPHS
        }
        or None,
    }
    _compiled(options)  # raises an error now, not in the middle of a forward
    return options


def _compiled(options: dict[str, Any]) -> Stage:
    """Return a compiled function that runs a stage on inputs; nothing is traced yet."""
    return torch.compile(FunctionType(_run.__code__.replace(), globals()), **options)


def _run(stage: Stage, *inputs: torch.Tensor) -> Any:
    """Run a stage. It is an argument, not part of a closure, so that cached code keeps no model alive."""
    return stage(*inputs)


def _used(kept: dict[Hashable, Any], key: Hashable, most: int) -> Any:
    """Return an entry that is used now, and drop the one that has been unused for longest if there are too many."""
    kept[key] = entry = kept.pop(key)
    if len(kept) > most:
        del kept[next(iter(kept))]
    return entry


class StageGraphs:
    """Runs stages; on a CUDA device, each of them as a graph that is captured at its first use.

    All graphs share one memory pool, because they run one after the other. The next run of a stage overwrites what it
    returned. A capture synchronises and takes a while; a replay does neither.

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
        self.options: dict[str, Any] | None = None  # of `torch.compile`, for the current call
        self.num_prepared = 0  # how many stages have been captured or compiled
        # By a stage's key and the shapes and dtypes of its inputs; None if it failed before.
        self._compiled: dict[Hashable, Stage | None] = {}
        self._graphs: dict[Hashable, StageGraph | None] = {}
        self._pool: Any = None

    def __call__(self, key: Hashable, stage: Stage, *inputs: torch.Tensor) -> Any:
        """Run a stage.

        Args:
            key (`Hashable`): The stage's name, and whatever else its launches depend on besides the inputs' shapes. If
                a graph exists for this key, it is replayed and the stage is not called.
            stage (`Callable`): Takes and returns tensors.
            inputs (`torch.Tensor`): Copied to the buffers that the graph reads.

        Returns:
            What the stage returns; valid until its next run.
        """
        name = str(key[0] if isinstance(key, tuple) else key)
        graph_key = (key, *((tensor.shape, tensor.dtype) for tensor in inputs))
        if self.options is not None and name in COMPILED:
            compile_key = (*graph_key, repr(self.options))
            if compile_key not in self._compiled:
                self._compiled[compile_key] = _compiled(self.options)
                self.num_prepared += 1
            if (compiled := _used(self._compiled, compile_key, MAX_COMPILED)) is not None:
                # Tensors of one shape can differ in the stride of an axis of length 1, which would need a new trace.
                alike = tuple(tensor.reshape(-1).view(tensor.shape) for tensor in inputs)
                try:
                    return self._run(name, compile_key, partial(compiled, stage), alike)
                except torch.OutOfMemoryError:  # another call may have the memory
                    logger.warning("hf_domino runs the stage %r without compiling it, as memory ran out.", name)
                except Exception as error:  # if it is the stage's own error, the stage raises it again
                    self._compiled[compile_key] = None
                    # The first line says which backend failed, the second one says why.
                    reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
                    logger.warning("hf_domino runs the stage %r without compiling it, as that failed: %s", name, reason)
        return self._run(name, graph_key, stage, inputs)

    def _run(self, name: str, graph_key: Hashable, stage: Stage, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Replay the stage's graph, after capturing it if needed; call the stage if it has no graph."""
        if not (self.enabled and _using_graphs.get()):
            return stage(*inputs)
        if graph_key not in self._graphs:
            self.num_prepared += 1
            try:
                self._graphs[graph_key] = self._try_capture(name, stage, inputs)
            except torch.OutOfMemoryError:  # another call may have the memory
                if isinstance(stage, partial):
                    raise
                logger.warning("hf_domino runs the stage %r without a CUDA graph, as memory ran out.", name)
                return stage(*inputs)
        graph = _used(self._graphs, graph_key, MAX_GRAPHS)
        if graph is None:
            return stage(*inputs)
        return graph.replay(inputs)

    def _try_capture(self, name: str, stage: Stage, inputs: tuple[torch.Tensor, ...]) -> StageGraph | None:
        """Capture a graph; if the model's own code synchronises, warn and return None, and the stage is just called."""
        try:
            # Buffers made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                return self.capture(stage, inputs)
        except RuntimeError as error:
            # A compiled stage is tried again by the caller, without compiling.
            if isinstance(stage, partial) or isinstance(error, torch.OutOfMemoryError):
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

        The random state is restored after the warm-ups, so that later draws are the same as without graphs.

        Args:
            stage (`Callable`): Takes and returns tensors.
            inputs (`tuple[torch.Tensor]`): Inputs with the shapes that all replays will have.
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
            # Make the capture allocate new cuBLAS workspaces in the graphs' pool. Transformers' own compiled generation
            # frees all workspaces outside of it, and a graph that uses one would then write to freed memory.
            torch._C._cuda_clearCublasWorkspaces()
            graph = torch.cuda.CUDAGraph()
            # "thread_local", because other threads may launch kernels and allocate memory meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                outputs = stage(*buffers)
        self._pool = self._pool or graph.pool()
        return StageGraph(graph, buffers, outputs)


@dataclass(frozen=True)
class StageGraph:
    """A captured stage.

    Args:
        graph (`torch.cuda.CUDAGraph`): The captured launches.
        inputs (`tuple[torch.Tensor]`): Buffers from which the graph reads its inputs.
        outputs (`Any`): What the stage returned; every replay overwrites its tensors.
    """

    graph: Any
    inputs: tuple[torch.Tensor, ...]
    outputs: Any

    def replay(self, inputs: tuple[torch.Tensor, ...]) -> Any:
        """Run the stage on new inputs of the same shapes."""
        for buffer, tensor in zip(self.inputs, inputs, strict=True):
            buffer.copy_(tensor)
        self.graph.replay()
        return self.outputs

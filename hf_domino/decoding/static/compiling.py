"""Stages that `torch.compile` has compiled, for calls that ask for it with `compile_config`.

The stages of many small kernels are compiled, the verification forward and the backbone, each at its first use with
inputs of some shapes; a graph then captures what was compiled. Every one is compiled from a code object of its own:
dynamo keeps what it traced, and counts how often, by code object. So widths do not use up each other's limit, and what
was traced goes with the workspace, before which a hook or an adapter would not be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

COMPILED = ("verify", "backbone")  # the rollout cannot be traced, and acceptance is a few kernels
MAX_COMPILED = 64  # of one workspace
# Graphs are captured here, and never inside one another.
MODES = {"default": None, "reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
MAKES_GRAPHS = "triton.cudagraphs"  # an option of inductor

Stage = Callable[..., Any]  # of tensors; gives tensors, or something that holds some


def signature(key: Hashable, inputs: tuple[torch.Tensor, ...]) -> Hashable:
    """Signature that a stage is captured and compiled for: its key, and shapes and dtypes of its inputs."""
    return (key, *((tensor.shape, tensor.dtype) for tensor in inputs))


@dataclass(frozen=True)
class CompileOptions:
    """Options of `torch.compile`; two that are equal compile the same.

    Args:
        backend (`str` or `Callable`): As in `CompileConfig`.
        fullgraph (`bool`): Likewise.
        mode (`str`, *optional*): One that makes no CUDA graphs; None is torch's default.
        options (`Mapping`, *optional*): For the backend.
    """

    backend: str | Callable
    fullgraph: bool
    mode: str | None
    options: Mapping[str, Any] | None = field(compare=False)
    _written: str = field(init=False)  # options, which need not be hashable

    def __post_init__(self) -> None:
        object.__setattr__(self, "_written", repr(sorted((self.options or {}).items())))

    @classmethod
    def of(cls, config: CompileConfig) -> CompileOptions:
        """Of a configuration, whose `dynamic` does not matter: no shape of a stage changes."""
        options = config.options and {name: value for name, value in config.options.items() if name != MAKES_GRAPHS}
        return cls(config.backend, config.fullgraph, MODES.get(config.mode, config.mode), options or None)

    def compile(self) -> Stage:
        """A compiled function that runs a stage on inputs; it has traced nothing yet.

        Raises:
            RuntimeError: torch's, for a backend, a mode or options it does not know.
        """
        function = FunctionType(_run.__code__.replace(), globals())
        options = None if self.options is None else dict(self.options)
        return torch.compile(
            function, fullgraph=self.fullgraph, dynamic=False, backend=self.backend, mode=self.mode, options=options
        )


def compile_options(target: PreTrainedModel, config: GenerationConfig) -> CompileOptions | None:
    """Options that a call compiles its stages with; None where it asks for nothing, or gets nothing.

    Args:
        target (`PreTrainedModel`): The target.
        config (`GenerationConfig`): The merged configuration of the call.

    Raises:
        RuntimeError: torch's, for a backend, a mode or options it does not know.
    """
    if config.compile_config is None or config.disable_compile:
        return None
    if config.cache_implementation != "static":
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
    options = CompileOptions.of(config.compile_config)
    options.compile()  # refused before any forward, if at all
    return options


@dataclass(frozen=True)
class CompiledStage:
    """A stage that runs as it was compiled.

    Args:
        key (`Hashable`): Its name, whatever else its launches depend on, and what it is compiled with.
        run (`Callable`): Compiled.
        stage (`Callable`): Takes and returns tensors.
    """

    key: tuple[Hashable, ...]
    run: Stage
    stage: Stage

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run it; the first time, with inputs of some shapes, compile it."""
        # Two tensors of one shape may differ in the stride of an axis of length 1, which would be traced anew.
        return self.run(self.stage, *(tensor.reshape(-1).view(tensor.shape) for tensor in inputs))


class StageCompiler:
    """Compiles the stages of one workspace, as the call that has it asks for.

    Args:
        options ([`CompileOptions`], *optional*): Of the call at hand; None compiles nothing.
    """

    def __init__(self, options: CompileOptions | None = None):
        self.options = options
        self._runs: dict[Hashable, Stage | None] = {}

    def compiled(self, key: Hashable, stage: Stage, inputs: tuple[torch.Tensor, ...]) -> CompiledStage | None:
        """A stage as it is compiled for inputs of these shapes; None for one that is not, or that has failed to be.

        Args:
            key (`Hashable`): See [`~hf_domino.decoding.static.graphs.StageGraphs`].
            stage (`Callable`): Takes and returns tensors.
            inputs (`tuple[torch.Tensor]`): What it is about to be called with.
        """
        parts = key if isinstance(key, tuple) else (key,)
        if self.options is None or parts[0] not in COMPILED:
            return None
        key = (*parts, self.options)
        found = signature(key, inputs)
        if found not in self._runs:
            if len(self._runs) >= MAX_COMPILED:
                self._runs.clear()
            self._runs[found] = self.options.compile()
        run = self._runs[found]
        return None if run is None else CompiledStage(key, run, stage)

    def give_up(self, compiled: CompiledStage, inputs: tuple[torch.Tensor, ...], error: Exception) -> None:
        """Warn, and do not compile this stage for these shapes again."""
        self._runs[signature(compiled.key, inputs)] = None
        # Which backend failed is in the first line, and why in the second.
        reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
        logger.warning("hf_domino runs the stage %r without compiling it, as that failed: %s", compiled.key[0], reason)


def _run(stage: Stage, *inputs: torch.Tensor) -> Any:
    """Run the traced stage: the stage is an argument, so that nothing that is kept holds a model."""
    return stage(*inputs)

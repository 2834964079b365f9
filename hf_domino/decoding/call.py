"""The arguments that a call of `generate` passes to the decoding loop, and the parts that are created once per call.

If shapes are fixed ([`choose_storage`] in support.py), the executor is a workspace that captures the functions of a
round on a GPU, and the target uses the workspace's cache. The loop is the same in both cases.

Shapes: B sequences, T prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.caches import GrowingCache, TargetCache
from hf_domino.decoding.drafting import ContextSession, DraftSession
from hf_domino.decoding.executor import Executor
from hf_domino.decoding.noise import StepNoise
from hf_domino.decoding.output import CommittedSequences
from hf_domino.decoding.recycling import RecyclingSession
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.static.graphs import compile_options
from hf_domino.decoding.static.slots import SlotCache
from hf_domino.decoding.static.workspace import CAPACITY_STEP, Workspace, take_workspace
from hf_domino.decoding.step_outputs import StepOutputs
from hf_domino.decoding.stopping import KnownStops
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache
from hf_domino.stats.phases import PhaseTimer
from hf_domino.targets.view import TargetModel, input_device


@dataclass(frozen=True)
class Parts:
    """The parts that the rounds of a call run with; all of them share one executor."""

    distribution: TokenDistribution  # the target's distribution of the next token
    session: DraftSession
    runner: TargetRunner


def open_session(
    drafter: DominoDraftModel,
    target: TargetModel,
    distribution: TokenDistribution,
    executor: Executor | None = None,
    context: ContextCache | None = None,
) -> DraftSession:
    """Create the session that drafts in a call.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target ([`TargetModel`]): The target.
        distribution ([`TokenDistribution`]): The target's distribution. Drafts ignore processors that keep state.
        executor ([`Executor`], *optional*): Calls the functions of a round.
        context ([`ContextCache`], *optional*): The drafter's context of an earlier call, to continue from.
    """
    if drafter.config.learns_while_drafting:
        return RecyclingSession(drafter, target, distribution.without_state(), executor)
    return ContextSession(drafter, target, distribution.without_state(), executor, context)


@dataclass(frozen=True)
class Call:
    """The prepared arguments of a call of `generate`."""

    model: PreTrainedModel  # the target
    drafter: DominoDraftModel
    input_ids: torch.Tensor  # [B, T] int64, padded on the left
    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    model_kwargs: dict[str, Any]  # cache, attention mask, positions and model-specific inputs
    is_fixed: bool = False  # whether rounds have a fixed shape, as `choose_storage` decides
    why_growing: str | None = None  # why they have not, if the call or the device prefers it

    @property
    def batch_size(self) -> int:
        """The number of sequences (B)."""
        return len(self.input_ids)

    @cached_property
    def stops(self) -> KnownStops:
        """The stops that are known without calling a stopping criterion."""
        return KnownStops.among(self.criteria)

    @cached_property
    def step_outputs(self) -> StepOutputs:
        """The collector of hidden states and attentions, if the caller wants them."""
        return StepOutputs(self.config)

    def parts(self, context: ContextCache | None = None) -> Parts:
        """Create the parts that the rounds run with, in a workspace if shapes are fixed.

        Args:
            context ([`ContextCache`], *optional*): The drafter's context of an earlier call, to continue from. Rounds
                of fixed shape begin anew.
        """
        drafter = self.drafter
        target = TargetModel(self.model, drafter.config.layer_ids(self.model.config))
        distribution = TokenDistribution(self.processors, self.stops)
        timer = PhaseTimer(device=input_device(self.model))
        executor: Executor
        storage: TargetCache
        if self.is_fixed:
            executor = self._workspace()
            executor.timer = timer
            distribution.hold(executor.hold_on_device)
            text_config = target.text_config if self.config.return_dict_in_generate else None
            room = (self.widest, self.longest)
            storage = SlotCache(executor, drafter.config.num_draft_tokens, room, text_config)
        else:
            executor = Executor(timer)
            storage = GrowingCache(self.model_kwargs[CACHE])
        session = open_session(drafter, target, distribution, executor, context)
        runner = TargetRunner(target, self.model_kwargs, storage, executor, self.step_outputs.forward_kwargs)
        return Parts(distribution, session, runner)

    def _workspace(self) -> Workspace:
        """Take or make a workspace."""
        compiling = compile_options(self.model, self.config)
        if compiling:  # a minute for each capacity
            num_positions = self.longest
        else:
            num_positions = min(self.longest, self._shortest)
        cache = self.model_kwargs[CACHE]
        device = self.input_ids.device
        workspace = take_workspace(self.model, self.drafter, cache, num_positions, self.batch_size, device)
        workspace.cache.is_batch = self.batch_size > 1
        workspace.graphs.options = compiling
        workspace.min_batch_size = self.batch_size if compiling else 1
        return workspace

    @cached_property
    def longest(self) -> int:
        """How many positions caches of fixed shape have at most."""
        longest = self.stops.max_length
        assert longest is not None, "generate always has a length limit, its own or the caller's"
        longest = max(longest, self._given_capacity)
        return longest + max(self._prompt_width - self.input_ids.shape[1], 0) + self.widest

    @property
    def _shortest(self) -> int:
        """How many positions caches of fixed shape have at first. They grow with what is generated."""
        return max(self._prompt_width, self.input_ids.shape[1], self._given_capacity) + CAPACITY_STEP + self.widest

    @property
    def _given_capacity(self) -> int:
        return getattr(self.config, "max_cache_len", None) or 0

    @property
    def _prompt_width(self) -> int:
        embeds = self.model_kwargs.get("inputs_embeds")
        if embeds is None:
            return self.input_ids.shape[1]
        return embeds.shape[1]

    @property
    def widest(self) -> int:
        """Positions of the largest block. It can begin at the last position, and all its proposals can be rejected."""
        return self.drafter.config.most_verified + 1

    def committed(self, streamer: BaseStreamer | None) -> CommittedSequences:
        """Create the committed sequences, which begin with the prompts."""
        return CommittedSequences(self.input_ids, self.criteria, self.config, streamer, self.stops)

    def noise(self, vocab_size: int) -> StepNoise | None:
        """Create the noise that tokens are drawn with; None if the target does not sample."""
        if not self.config.do_sample:
            return None
        num_steps = None
        if self.stops.max_length is not None:
            num_steps = max(self.stops.max_length - self.input_ids.shape[1], 1)
        return StepNoise(self.batch_size, vocab_size, self.input_ids.device, num_steps)

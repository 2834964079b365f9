"""The parts of a call that have shapes: with `cache_implementation="static"` fixed ones, else shapes that grow.

The loop is the same. Parts of fixed shape run the same functions as stages of fixed-shape tensors: backbone, rollout or
growth, verification forward, acceptance. On a GPU each stage is a graph, launched as one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.candidate_generator import DominoCandidateGenerator
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.sampling import TokenDistribution
from hf_domino.decoding.static.distributions import FixedDistribution
from hf_domino.decoding.static.graphs import compile_options
from hf_domino.decoding.static.stages import StaticRunner
from hf_domino.decoding.static.workspace import Workspace, take_workspace
from hf_domino.decoding.stopping import KnownStops
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.context import ContextCache


def parts_of(
    target: PreTrainedModel,
    drafter: DominoDraftModel,
    processors: LogitsProcessorList,
    stops: KnownStops,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
    forward_kwargs: dict[str, bool],
    context: ContextCache | None,
) -> tuple[TokenDistribution, TargetRunner, DominoCandidateGenerator]:
    """Make the target's distribution and runner, and the candidate generator of a call."""
    compiling = compile_options(target, config)
    if config.cache_implementation != "static":
        distribution = TokenDistribution(processors, stops)
        generator = DominoCandidateGenerator(
            drafter, target, config, model_kwargs=model_kwargs, distribution=distribution
        )
        if context is not None:
            generator.continue_from(context)
        return distribution, TargetRunner(generator.target, model_kwargs, forward_kwargs, generator.timer), generator
    drafter.config.check_supports("cache_implementation='static'")
    workspace = _workspace_of(target, drafter, stops, input_ids, model_kwargs, config)
    workspace.graphs.options = compiling
    distribution = FixedDistribution(processors, stops, workspace)
    generator = DominoCandidateGenerator(
        drafter, target, config, model_kwargs=model_kwargs, distribution=distribution, workspace=workspace
    )
    is_returned = bool(config.return_dict_in_generate)
    runner = StaticRunner(generator.target, drafter, model_kwargs, generator.timer, workspace, is_returned)
    return distribution, runner, generator


def _workspace_of(
    target: PreTrainedModel,
    drafter: DominoDraftModel,
    stops: KnownStops,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
) -> Workspace:
    """Take a workspace that is long enough for the call."""
    embeds = model_kwargs.get("inputs_embeds")
    limit = stops.max_length
    if embeds is None:
        num_embeds = 0
    else:
        num_embeds = max(embeds.shape[1] - input_ids.shape[1], 0)
    assert limit is not None, "generate always has a length limit, its own or the caller's"
    longest = max(limit, getattr(config, "max_cache_len", None) or 0) + num_embeds
    # The last block may begin at the last position and be rejected as a whole.
    longest += max(drafter.config.num_draft_tokens, drafter.config.fixed_tree_size or 0) + 1
    return take_workspace(target, drafter, model_kwargs[CACHE], longest, len(input_ids), input_ids.device)

"""The parts of a call that have shapes: with `cache_implementation="static"` fixed ones, else shapes that grow.

The loop is the same. Parts of fixed shape run the same functions as stages of fixed-shape tensors: backbone, rollout or
growth, verification forward, acceptance. On a GPU each stage is a graph, launched as one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.recycling import RecyclingSession
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.graphs import compile_options
from hf_domino.decoding.static.laws import FixedLaw
from hf_domino.decoding.static.stages import StaticDraftSession, StaticRunner
from hf_domino.decoding.static.workspace import take_workspace
from hf_domino.decoding.stopping import KnownStops
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.phases import PhaseTimer
from hf_domino.kinds.context import ContextCache
from hf_domino.target.view import TargetModel


def parts_of(
    target: TargetModel,
    drafter: DominoDraftModel,
    processors: LogitsProcessorList,
    stops: KnownStops,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
    timer: PhaseTimer,
    forward_kwargs: dict[str, bool],
    context: ContextCache | None,
) -> tuple[TokenLaw, TargetRunner, DraftSession]:
    """Make the target's law and runner, and the draft session of a call."""
    compiling = compile_options(target.model, config)
    if config.cache_implementation != "static":
        law, session_of_kind = (
            TokenLaw(processors, stops),
            RecyclingSession if drafter.config.kind.has_table else DraftSession,
        )
        runner = TargetRunner(target, model_kwargs, forward_kwargs, timer)
        return law, runner, session_of_kind(drafter, target, law.without_state(), timer, context)
    drafter.config.kind.refuse_what_it_lacks("cache_implementation='static'")
    embeds, limit = model_kwargs.get("inputs_embeds"), stops.max_length
    num_embeds = 0 if embeds is None else max(embeds.shape[1] - input_ids.shape[1], 0)
    assert limit is not None, "generate always has a length limit, its own or the caller's"
    longest = max(limit, getattr(config, "max_cache_len", None) or 0) + num_embeds
    # The last block may begin at the last position and be rejected as a whole.
    longest += max(drafter.config.num_draft_tokens, drafter.config.fixed_tree_size or 0) + 1
    workspace = take_workspace(target.model, drafter, model_kwargs[CACHE], longest, input_ids.device)
    workspace.graphs.options = compiling
    law, is_returned = FixedLaw(processors, stops, workspace), bool(config.return_dict_in_generate)
    runner = StaticRunner(target, drafter, model_kwargs, timer, workspace, is_returned)
    return law, runner, StaticDraftSession(drafter, target, law.without_state(), timer, workspace)

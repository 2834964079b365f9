"""Rounds of fixed shape, for `cache_implementation="static"`: the parts of the loop as stages that can be captured.

The loop is the one of `loop.py`; its target runner, draft session and judge are replaced by ones that run the same
functions as stages of fixed-shape tensors: backbone, rollout or growth, verification forward, acceptance. On a GPU each
stage is a graph, launched as one. A law that reads values back, or asks a caller, is no part of a stage: what uses it
runs between them.
"""

from __future__ import annotations

import torch
from transformers import GenerationConfig

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.runner import TargetRunner
from hf_domino.decoding.sampling import TokenLaw
from hf_domino.decoding.static.compiling import CompileOptions
from hf_domino.decoding.static.drafts import StaticDraftSession
from hf_domino.decoding.static.judging import StaticJudge
from hf_domino.decoding.static.target import StaticRunner
from hf_domino.decoding.static.workspace import take_workspace


def make_static(
    input_ids: torch.Tensor,
    runner: TargetRunner,
    session: DraftSession,
    law: TokenLaw,
    config: GenerationConfig,
    compiling: CompileOptions | None = None,
) -> tuple[StaticRunner, StaticDraftSession, StaticJudge]:
    """The parts of the loop with fixed shapes, in place of those that grow.

    Args:
        input_ids (`torch.Tensor`): The prompt `[1, T]`.
        runner ([`TargetRunner`]): What would run the target; its cache is a static one that is still empty.
        session ([`DraftSession`]): What would draft.
        law ([`TokenLaw`]): The target's, and where texts end.
        config (`GenerationConfig`): For `max_cache_len`, and for whether the cache is returned.
        compiling ([`CompileOptions`], *optional*): What stages are compiled with.
    """
    session.drafter.config.kind.refuse_what_it_lacks("cache_implementation='static'")
    target, drafter, embeds = runner.target, session.drafter, runner.kwargs.get("inputs_embeds")
    num_embeds = 0 if embeds is None else embeds.shape[1] - input_ids.shape[1]
    most = max(drafter.config.num_draft_tokens, drafter.config.fixed_tree_size or 0)
    limit = law.stops.max_length
    assert limit is not None, "generate always has a length limit, its own or the caller's"
    longest = max(limit, getattr(config, "max_cache_len", None) or 0) + max(num_embeds, 0)
    # The last block may begin at the last position and be rejected as a whole.
    workspace = take_workspace(target.model, drafter, runner.cache, longest + most + 1, input_ids.device)
    workspace.graphs.compiler.options = compiling
    return (
        StaticRunner(target, session, runner.kwargs, workspace, bool(config.return_dict_in_generate)),
        StaticDraftSession(drafter, target, session.law, session.timer, workspace),
        StaticJudge(law, workspace),
    )

"""The decoding loop: draft, verify, commit, until done.

Shapes: B batch, T tokens so far, P proposals, N tokens committed in a round.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_domino.decoding.cache import TargetRunner
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.output import CommittedSequence
from hf_domino.decoding.sampling import TokenLaw, draft_law
from hf_domino.decoding.verification import verify
from hf_domino.modeling import DominoDraftModel
from hf_domino.stats import DecodingStats, PhaseTimer, record_stats
from hf_domino.target import TargetModel


@torch.no_grad()
def assisted_decoding(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    drafter: DominoDraftModel,
    streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Generate with a drafter; the output is the target's own, greedy or sampled.

    `generate` calls this in place of its own assisted loop once [`install`] has run.

    Args:
        model (`PreTrainedModel`): The target.
        input_ids (`torch.Tensor`): Prompt `[1, T]`.
        logits_processor (`LogitsProcessorList`): Processors and warpers that `generate` prepared.
        stopping_criteria (`StoppingCriteriaList`): Likewise.
        generation_config (`GenerationConfig`): Likewise.
        drafter ([`DominoDraftModel`]): The drafter.
        streamer (`BaseStreamer`, *optional*): Receives committed tokens.
        model_kwargs: Cache, attention mask, positions and model-specific inputs.

    Returns:
        `torch.Tensor` or `GenerateDecoderOnlyOutput`: Prompt and new tokens, `[1, T + new]`.
    """
    start, timer = time.perf_counter(), PhaseTimer()
    target = TargetModel(model, drafter.config)
    law = TokenLaw(logits_processor, bool(generation_config.do_sample))
    session = DraftSession(drafter, target, draft_law(law, logits_processor), timer)
    stats = DecodingStats(drafter.config.num_draft_tokens, rows=[[] for _ in input_ids])
    committed = CommittedSequence(input_ids, stopping_criteria, generation_config, streamer)
    runner = TargetRunner(target, model_kwargs)
    _prefill(runner, session, committed, law)
    while not committed.finished:
        _round(runner, session, committed, law, stats, timer)
    stats.num_new_tokens = committed.ids.shape[1] - input_ids.shape[1]
    stats.seconds = time.perf_counter() - start
    stats.phases = dict(timer.seconds) if timer.enabled else None
    record_stats(drafter, stats)
    return committed.result(runner.kwargs["past_key_values"])


def _prefill(runner: TargetRunner, session: DraftSession, committed: CommittedSequence, law: TokenLaw) -> None:
    """Process the prompt and commit the first token, which is the target's own."""
    prompt = committed.ids
    mask = runner.kwargs.get("attention_mask")
    logits, captured = runner.prefill(prompt)
    num_new = captured[0].shape[1]
    real, positions = _real_positions(prompt, mask)
    session.observe(tuple(states[:, real[-num_new:]] for states in captured), positions[:, real][:, -num_new:])
    scores = law.scores(prompt, logits, prompt[:, :0])
    runner.commit(committed.commit(law.choose(scores), logits, scores))


def _real_positions(input_ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Which columns of a left-padded prompt are not padding `[T]`, and every column's position `[1, T]`."""
    if mask is None or mask.dim() != 2:
        mask = torch.ones_like(input_ids)
    mask = mask[:, -input_ids.shape[1] :]
    return mask[0].bool(), (mask.long().cumsum(dim=1) - 1).clamp_min(0)


def _round(
    runner: TargetRunner,
    session: DraftSession,
    committed: CommittedSequence,
    law: TokenLaw,
    stats: DecodingStats,
    timer: PhaseTimer,
) -> None:
    """Draft, verify and commit one block."""
    prefix = committed.ids
    proposal = session.propose(prefix, _room(prefix, session.target))
    with timer.phase("verify"):
        logits, captured = runner.check_block(prefix, proposal.tokens)
        scores = law.scores(prefix, logits, proposal.tokens)
        verification = verify(proposal, scores, law.do_sample)
        accepted = int(verification.num_accepted)
    stats.rows[0].append(accepted + 1)
    tokens = torch.cat((proposal.tokens[:, :accepted], verification.bonus[:, None]), dim=1)  # [1, N]
    num_kept = committed.commit(tokens, logits, scores)
    session.observe_block(captured, num_kept)
    runner.commit(num_kept, num_checked=proposal.tokens.shape[1] + 1)


def _room(prefix: torch.Tensor, target: TargetModel) -> int | None:
    """Proposals for which the target still has positions; None for no limit."""
    return None if target.position_limit is None else max(target.position_limit - prefix.shape[1], 0)

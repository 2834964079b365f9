"""The adapter for Transformers' own assisted loop: its `CandidateGenerator` protocol over our drafting.

That loop runs the target, verifies and rewinds; it asks for candidates before every forward, hands over the outputs of
the last one, and merges `model_kwargs_overrides` into the next. It decodes one sequence at a time.

Shapes: T committed tokens, C newly committed ones, V vocabulary.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.pacing.pacer import most_proposals
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.sampling import TokenLaw, draft_law
from hf_domino.decoding.stopping import KnownStops
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.identity import recognise
from hf_domino.stats import DecodingStats, record_stats
from hf_domino.target import TargetModel


class DominoCandidateGenerator(CandidateGenerator):
    """Drafts for one call of `generate`.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        model (`PreTrainedModel`): The target.
        generation_config (`GenerationConfig`): For `do_sample`, `max_length`, `num_assistant_tokens` and the
            end-of-text tokens.
        logits_processor (`LogitsProcessorList`): The processors `generate` applies to the target.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: DominoDraftModel,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
    ):
        ends = getattr(generation_config, "_eos_token_tensor", None)
        self._stops = KnownStops(
            frozenset() if ends is None else frozenset(ends.flatten().tolist()), generation_config.max_length
        )
        law = TokenLaw(logits_processor, bool(generation_config.do_sample), self._stops)
        target = TargetModel(model, drafter.config)
        self.model_kwargs_overrides = target.capture_kwargs()
        drafting = draft_law(law, drafter.config.draft_law)
        self._target, self._session = target, DraftSession(drafter, target, drafting)
        self._num_observed = self._num_proposed = 0
        self._start = time.perf_counter()
        most = most_proposals(drafter, model, generation_config)
        self._stats = DecodingStats.of_rows(most, 1, recognise(drafter.config, model))
        record_stats(drafter, self._stats)

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft a block after the committed tokens.

        Args:
            input_ids (`torch.Tensor`): Committed tokens `[1, T]`, the anchor last.
            model_kwargs (`dict`, *optional*): The loop's; its `attention_mask` tells left padding.
            model_outputs (`ModelOutput`, *optional*): The target's last outputs.
            is_first_iteration (`bool`, *optional*): Whether the target has not run yet: there is nothing to draft from.

        Returns:
            `tuple`: Committed tokens with the candidates behind them, and the scores `[1, candidates, V]` they were
            drawn from, or None if they were not sampled.
        """
        if is_first_iteration:
            return input_ids, None
        self._observe(input_ids, (model_kwargs or {}).get("attention_mask"), model_outputs)
        length, most = input_ids.shape[1], self._stats.num_draft_tokens
        room = self._stops.room(length)
        proposal = self._session.propose(Prefixes.of(input_ids), most if room is None else min(room, most))
        # Up to an end of text: as that loop's bonus token it costs no round, and nobody is asked what comes behind.
        tokens = proposal.tokens[:, : self._stops.num_open([length], proposal.tokens)[0]]
        self._num_proposed = tokens.shape[1]
        if tokens.shape[1] == 0 or proposal.scores is None:
            return torch.cat((input_ids, tokens), dim=1), None
        return torch.cat((input_ids, tokens), dim=1), proposal.scores[:, : tokens.shape[1]]

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Count a round. This loop reports accepted candidates after its cuts by length and end of text."""
        if self._num_observed:
            self._stats.rows[0].append(int(num_matches) + 1)
            self._stats.proposed[0].append(self._num_proposed)
        self._stats.num_new_tokens += int(num_matches) + 1
        self._stats.seconds = time.perf_counter() - self._start

    def _observe(self, input_ids: torch.Tensor, mask: torch.Tensor | None, outputs: ModelOutput | None) -> None:
        """Hand the hidden states of newly committed positions, the prompt's padding left out, to the drafter."""
        captured, num_new = self._target.captured(outputs), input_ids.shape[1] - 1 - self._num_observed
        if self._num_observed:
            self._session.observe_block(captured, [num_new])
        else:
            real = torch.ones_like(input_ids) if mask is None else mask
            positions = (real.cumsum(dim=1) - 1).clamp_min(0)[:, :num_new]
            self._session.observe(captured, positions, real[:, :num_new])
        self._num_observed += num_new

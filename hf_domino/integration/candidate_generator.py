"""The adapter for Transformers' own assisted loop: its `CandidateGenerator` protocol over our drafting.

That loop runs the target, verifies and rewinds; it asks for candidates before every forward, hands over the outputs of
the last one, and merges `model_kwargs_overrides` into the next. It decodes one sequence at a time, up to the length of
the generation configuration: a stopping criterion that allows more would let it run for ever.

It would draw the tokens of a whole block as one tensor, which is other noise than plain generation's. So a processor
behind all others leaves only the token that the step's own noise draws, and nothing to chance.

Shapes: T committed tokens, C newly committed ones, P proposals, V vocabulary.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import ModelOutput

from hf_domino._common.refusal import refusal
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.pacing.pacer import most_proposals
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual.rule import ResidualRule
from hf_domino.decoding.sampling import TokenLaw, choose
from hf_domino.decoding.stopping import KnownStops
from hf_domino.decoding.verification import CoupledRule
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.stats import DecodingStats, record_stats
from hf_domino.target.identity import recognise
from hf_domino.target.view import TargetModel


class ForcedChoice(LogitsProcessor):
    """Forces the tokens that a rule would draw, and remembers the scores it has covered up.

    Args:
        rule ([`CoupledRule`]): Whose noise it is; it begins with the first scores.
        prompt_length (`int`): Tokens before the first step.
    """

    def __init__(self, rule: CoupledRule, prompt_length: int):
        self._rule, self._prompt_length = rule, prompt_length
        self._length = prompt_length  # of the text before the round
        self.num_committed = 0  # steps
        self._covered: list[torch.Tensor] = []  # [1, V] each, of the round

    def begin_round(self, length: int) -> None:
        """A round behind a text of this length begins."""
        self._length, self._covered = length, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid all but one token, at the position behind these ids `[1, T]`."""
        if self._rule.draft_noise is None:
            self._rule.begin(Prefixes.of(input_ids), scores.shape[1])
        self._covered.append(scores.clone())
        noise = self._rule.draft_noise
        assert noise is not None, "only what is drawn is forced"
        token = choose(scores, noise[:, input_ids.shape[1] - self._length])
        return torch.full_like(scores, -torch.inf).scatter(1, token[:, None], 0.0)

    def end_round(self, length: int, scores: torch.Tensor) -> None:
        """Uncover the round's scores `[1, P + 1, V]`, behind which the text has this length."""
        self.num_committed = length - self._prompt_length
        for index, covered in enumerate(self._covered):
            scores[:, index] = covered

    def end(self) -> None:
        """Leave the default generator where plain generation would have left it."""
        self._rule.end(self.num_committed)


class DominoCandidateGenerator(CandidateGenerator):
    """Drafts for one call of `generate`.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        model (`PreTrainedModel`): The target.
        generation_config (`GenerationConfig`): For `do_sample`, `max_length`, `num_assistant_tokens` and the
            end-of-text tokens.
        logits_processor (`LogitsProcessorList`): The processors `generate` applies to the target, in a list of its own:
            one may be added.
        prompt_length (`int`): Tokens to go on from.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: DominoDraftModel,
        model: PreTrainedModel,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        prompt_length: int,
    ):
        ends = getattr(generation_config, "_eos_token_tensor", None)
        self._stops = KnownStops(
            frozenset() if ends is None else frozenset(ends.flatten().tolist()), generation_config.max_length
        )
        law = TokenLaw(LogitsProcessorList(logits_processor), self._stops)
        target, config = TargetModel(model, drafter.config), drafter.config
        config.check()  # a field may have been set since
        self.model_kwargs_overrides = target.capture_kwargs()
        self._target, self._session = target, DraftSession(drafter, target, law.without_state())
        do_sample = bool(generation_config.do_sample)
        self._rule = ResidualRule.of_call(config, law, do_sample) or CoupledRule(law, do_sample, is_watching=False)
        self._forced: ForcedChoice | None = None
        if do_sample and isinstance(self._rule, CoupledRule):
            self._forced = ForcedChoice(self._rule, prompt_length)
            logits_processor.append(self._forced)
            # That loop tells nobody when it ends; it lets go of its candidate generator.
            weakref.finalize(self, self._forced.end)
        self._num_observed = self._num_proposed = 0
        self._start = time.perf_counter()
        most = most_proposals(drafter, model, generation_config)
        self._stats = DecodingStats.of_rows(most, 1, config.kind, recognise(config, model))
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

        Raises:
            ValueError: Where the text is full, and a stopping criterion of the caller's asks for more.
        """
        length, limit = input_ids.shape[1], self._stops.max_length
        if limit is not None and length >= limit:
            remedy = "Pass max_new_tokens in its place, or call hf_domino.install() to generate with our loop."
            raise refusal("max_length of stopping_criteria in an attached target", f"at most {limit}", "more", remedy)
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        self._observe(input_ids, (model_kwargs or {}).get("attention_mask"), model_outputs)
        most = self._stats.num_draft_tokens
        room = self._stops.room(length)
        count, prefixes = most if room is None else min(room, most), Prefixes.of(input_ids)
        if self._forced is None:
            self._rule.begin(prefixes, model_outputs.logits.shape[2])
        else:
            self._forced.begin_round(length)
        self._rule.begin_round(prefixes, count)
        proposals = self._session.propose(prefixes, count, self._rule.draft_noise, self._rule.listener(None))
        scores = self._rule.draft_scores
        # Up to an end of text: as that loop's bonus token it costs no round, and nobody is asked what comes behind. One
        # that was drawn must be judged like any other draw, or fewer texts would end.
        kept = self._stops.num_open([length], proposals)[0] + (scores is not None)
        tokens = proposals[:, :kept]
        self._num_proposed = tokens.shape[1]
        if tokens.shape[1] == 0 or scores is None:
            return torch.cat((input_ids, tokens), dim=1), None
        return torch.cat((input_ids, tokens), dim=1), scores[:, : tokens.shape[1]]

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Count a round. This loop reports accepted candidates after its cuts by length and end of text."""
        if self._forced is not None:
            self._forced.end_round(input_ids.shape[1], scores)
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
            self._session.observe(captured, num_new, None if mask is None else mask[:, :num_new])
        self._num_observed += num_new

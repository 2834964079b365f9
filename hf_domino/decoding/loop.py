"""The decoding loop: it drafts, verifies and commits until every sequence is done. A single sequence is a batch of 1.

Every sequence advances by its own acceptance length, and leaves the batch when it is done.

Shapes: B unfinished sequences, T prompt tokens, P proposals, W = P + 1 positions of a block, V vocabulary.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_domino._common.cache_name import CACHE
from hf_domino._common.errors import mark_restartable, may_restart
from hf_domino.decoding.caches import sliding_windows
from hf_domino.decoding.call import Call
from hf_domino.decoding.candidate_generator import DominoCandidateGenerator
from hf_domino.decoding.kept_context import keep_context, kept_context
from hf_domino.decoding.noise import StepNoise
from hf_domino.decoding.policy import most_proposals
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.prompt_lookup import num_padding
from hf_domino.decoding.recording import copied, open_record
from hf_domino.decoding.round import Outcome, Plan
from hf_domino.decoding.static.workspace import free_memory
from hf_domino.decoding.support import Support, choose_storage, in_growing_layers
from hf_domino.decoding.tree import Tree
from hf_domino.decoding.verification import accept, check_drawn, take
from hf_domino.methods import DominoDraftModel
from hf_domino.methods.scorer import along
from hf_domino.stats.decoding_stats import DecodingStats, hand_out, record_stats
from hf_domino.targets.attention import rowwise_attention
from hf_domino.targets.identity import recognise
from hf_domino.targets.packed import packed_linears
from hf_domino.targets.view import Captured

# With a vocabulary of at least this size, a CPU verifies a single sequence one position at a time. That way it never
# computes the distributions of positions after the first rejected proposal.
STEPWISE_VOCABULARY = 2**14


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
    """Generate with a drafter; the output is the same as the target's own, whether greedy or sampled.

    After [`install`] has run, `generate` calls this function in place of its own assisted loop.

    Args:
        model (`PreTrainedModel`): The target.
        input_ids (`torch.Tensor`): Prompts `[B, T]`, padded on the left.
        logits_processor (`LogitsProcessorList`): The logits processors and warpers that `generate` prepared.
        stopping_criteria (`StoppingCriteriaList`): The stopping criteria that `generate` prepared.
        generation_config (`GenerationConfig`): The merged configuration that `generate` prepared.
        drafter ([`DominoDraftModel`]): The drafter.
        streamer (`BaseStreamer`, *optional*): Receives the committed tokens.
        model_kwargs: The cache, the attention mask, positions and model-specific inputs.

    Returns:
        `torch.Tensor` or `GenerateDecoderOnlyOutput`: The prompts followed by the new tokens, `[B, T + new]`.
    """
    start = time.perf_counter()
    input_ids = input_ids.long()
    if (positions := model_kwargs.get("position_ids")) is not None:
        model_kwargs["position_ids"] = positions.expand(*positions.shape[:-2], len(input_ids), -1)
    call = Call(model, drafter, input_ids, generation_config, logits_processor, stopping_criteria, model_kwargs)
    try:
        call = choose_storage(call)
    except ValueError as error:
        mark_restartable(error)
        raise
    generation: Generation | None = None
    try:
        generation = _generated(call, streamer)
    except torch.OutOfMemoryError as error:
        if not (call.is_fixed and may_restart(error)):
            raise
        reason = str(error).partition("\n")[0]
    if generation is None:
        free_memory(input_ids.device)  # not above, because there the error still holds what the call has allocated
        call = in_growing_layers(call, f"fixed shapes take more memory than there is: {reason}")
        generation = _generated(call, streamer)
    generation.finish_stats(time.perf_counter() - start)
    return generation.result()


def _generated(call: Call, streamer: BaseStreamer | None) -> Generation:
    """Run a call to its end."""
    generation = None
    try:
        generation = Generation(call, streamer)
        with generation.exact():
            generation.run()
    except Exception as error:
        if generation is None or generation.may_restart:
            mark_restartable(error)
        raise
    return generation


def decode_mode(target: PreTrainedModel) -> AbstractContextManager:
    """The context manager that Transformers' own loops decode in."""
    # Outside the CPU, it makes the experts of a mixture run with other kernels than during prefill.
    enter = getattr(target, "_optimize_model_for_decode", nullcontext)  # only newer versions of Transformers have it
    return enter()


class Generation:
    """Runs the rounds of one call of `generate`.

    Args:
        call ([`Call`]): The call.
        streamer (`BaseStreamer`, *optional*): Receives the committed tokens.
    """

    def __init__(self, call: Call, streamer: BaseStreamer | None = None):
        drafter = call.drafter
        self.call = call
        most = most_proposals(drafter, call.model, call.config)
        self.stats = DecodingStats.of_rows(most, call.batch_size, recognise(drafter.config, call.model))
        self.stats.why_growing = call.why_growing
        hand_out(streamer, self.stats)
        context, self._has_gap = kept_context(call.model_kwargs[CACHE], drafter, call.batch_size)
        parts = call.parts(context)
        self.distribution = parts.distribution
        self.runner = parts.runner
        self.session = parts.session
        self.support = Support(self.runner, self.session)
        self.executor = parts.session.executor
        self.generator = DominoCandidateGenerator(drafter, call.model, call.config, session=parts.session)
        self.committed = call.committed(streamer)
        lookup = self.generator.lookup
        lookup.read = parts.session.read = self.committed.tokens
        if lookup.most:
            lookup.padding = num_padding(call.input_ids, call.model_kwargs.get("attention_mask"))
        self.rows = list(range(call.batch_size))  # indices of the unfinished sequences in the batch
        self.noise: StepNoise | None = None  # stays None if the target does not sample
        self.record = open_record()  # None unless somebody wants the proposals of all rounds
        self.step_outputs = call.step_outputs if call.step_outputs.forward_kwargs else None  # None if nobody wants any
        self.is_stepwise = False  # whether rounds are verified one position at a time
        self.may_restart = True  # until something has seen the first scores, such as a processor, or drawn a token

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Inside this `with` block, a CPU computes each position of a forward alone, with packed weights."""
        longest = self.call.stops.max_length
        # A call of one token verifies nothing, which would be worth reading all weights to see whether they changed.
        is_short = longest is not None and longest <= self.call.input_ids.shape[1] + 1
        packed: AbstractContextManager = nullcontext()
        if not self.executor.is_compiled and not is_short:
            drafter = self.call.drafter
            weights = drafter.vocabulary.weights(self.generator.target)
            packed = packed_linears(self.call.model, drafter, weights=weights)
        with rowwise_attention(self.call.input_ids.device), packed:
            yield

    def run(self) -> None:
        """Run the prefill and all rounds. The cache of a single sequence stays usable even after an exception."""
        timer = self.executor.timer
        try:
            self.prefill()
            timer.reset()  # phases cover the rounds only, not the prefill
            with decode_mode(self.runner.model):
                while self.rows:
                    with timer.phase("rest"):  # the time that none of the phases inside it covers
                        self.run_round()
        except BaseException:
            try:
                self.runner.storage.end(self.call.batch_size)
            except Exception as error:  # only warn, so that the original exception is not hidden
                warnings.warn(f"The target's cache could not be restored to the committed tokens: {error!r}.")
            raise
        finally:
            if self.noise is not None:
                self.noise.end(self.committed.num_steps)
            self.generator.lookup.finish(self.call.batch_size)
        self.runner.storage.end(self.call.batch_size)

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """Return what `generate` returns. If the caller can use the cache again, keep the drafter's context on it."""
        cache = self.runner.cache
        has_outputs = self.call.config.return_dict_in_generate
        is_seen_again = self.call.batch_size == 1 and (has_outputs or getattr(cache, "_is_user_defined", False))
        if is_seen_again and (context := self.session.context()) is not None:
            keep_context(cache, self.generator.assistant_model, context, self._has_gap)
        self.executor.release(self.call.model, self.call.drafter)
        result = self.committed.result(cache, **self.call.step_outputs.results())
        if has_outputs:
            hand_out(result, self.stats)
        return result

    def finish_stats(self, seconds: float) -> None:
        """Complete the statistics of the call, which took this many seconds, and record them for the drafter."""
        timer = self.executor.timer
        self.stats.cut(self.committed.num_new_tokens)
        self.stats.seconds = seconds
        self.stats.chain = self.support.why_chain
        if timer.enabled:
            self.stats.phases = timer.seconds()
        else:
            self.stats.phases = None
        record_stats(self.generator.assistant_model, self.stats)

    def prefill(self) -> None:
        """Process the prompts and commit the first tokens, which the target chooses without a draft."""
        call = self.call
        # `generate` drops an attention mask of all ones, and stores its length here.
        mask_length = getattr(call.config, "_mask_length", None)
        logits, captured = self.runner.prefill(call.input_ids, call.config.prefill_chunk_size, mask_length)
        self.generator.observe_prompt(captured, self.runner.prompt_length, self.runner.prompt_mask)
        self.may_restart = False
        scores = self.distribution.scores(self.committed.prefixes(self.rows), logits)
        self.noise = call.noise(logits.shape[2])
        tokens = take(scores, self._noise(0))
        self.committed.commit(self.rows, tokens, [1] * len(self.rows), logits, scores)
        if self.step_outputs is not None:
            self.step_outputs.add_prompt(self.runner.outputs)
        is_long = len(self.rows) == 1 and call.input_ids.is_cpu and logits.shape[2] >= STEPWISE_VOCABULARY
        self.is_stepwise = self.distribution.may_keep_state or (is_long and not call.is_fixed)
        unfinished = self.committed.unfinished
        self.runner.begin(unfinished)
        self._keep_rows(unfinished)

    def run_round(self) -> None:
        """Propose tokens, verify them, and commit those that the target itself would have generated."""
        start = time.perf_counter()
        num_prepared = self.executor.num_prepared
        prefixes = self.committed.prefixes(self.rows)
        self.runner.storage.reserve(prefixes.lengths)
        plan, noise, proposals = self._propose(prefixes)
        plan = plan.followed_with(proposals.num_nodes)
        if self.record is not None:
            self.record.append(copied(proposals))
        with self.executor.timer.phase("verify"):
            logits, captured = self.runner.forward_block(prefixes.last(), proposals)
            if self.is_stepwise:
                outcome = self._commit_one_by_one(plan, proposals, logits, noise)
            else:
                outcome = self._commit(plan, prefixes, proposals, logits, noise)
        self.session.learn(prefixes, proposals, logits)
        self._settle(outcome, captured)
        if self.executor.num_prepared > num_prepared:
            outcome = replace(outcome, plan=replace(outcome.plan, is_timed=False))
        self.generator.observe_round(outcome, time.perf_counter() - start)

    def _propose(self, prefixes: Prefixes) -> tuple[Plan, torch.Tensor | None, Tree]:
        """Plan the round and make its proposals; return the plan, the noise of the round's steps, and the proposals."""
        limit = self.generator.target.position_limit
        positions_left = None
        if limit is not None:
            positions_left = limit - self.runner.next_position() - 1
        plan = self.generator.plan(prefixes, positions_left, self.support.may_plan_trees)
        noise = None
        if self.noise is not None:
            noise = self._noise(plan.length)
        proposals = self.generator.propose(plan, prefixes, noise)
        if proposals.parents is None or self.support.takes_trees:
            return plan, noise, proposals
        return self._propose(prefixes)  # now it is known that the target takes no trees

    def _noise(self, most: int) -> torch.Tensor | None:
        """The noise `[B, most + 1, V]` of the decode steps that a round with up to `most` proposals can cover."""
        if self.noise is None:
            return None
        return self.noise.ahead(self.rows, self.committed.num_new(self.rows), most + 1)

    def _commit(
        self, plan: Plan, prefixes: Prefixes, proposals: Tree, logits: torch.Tensor, noise: torch.Tensor | None
    ) -> Outcome:
        """Verify all positions together, and append the accepted tokens to the sequences."""
        verification = self.executor.run(accept, self.distribution, prefixes, proposals, logits, noise)
        # A single transfer brings everything that the host needs.
        found = verification.decided.tolist()
        counts = [values[0] for values in found]
        check_drawn(min(counts) > 0)
        if verification.path is None:
            path = None
        else:
            path = verification.path[:, : max(counts)]
        outcome = Outcome(plan, self.rows, proposals.num_nodes, counts, path=path)
        outcome.add_to(self.stats)  # before the commit, because a streamer may read the statistics during it
        logits = along(path, logits)
        scores = along(path, verification.scores)
        values = [values[1:] for values in found]
        kept = self.committed.commit(self.rows, verification.tokens, counts, logits, scores, values)
        return replace(outcome, num_kept=kept)

    def _commit_one_by_one(
        self, plan: Plan, proposals: Tree, logits: torch.Tensor, noise: torch.Tensor | None
    ) -> Outcome:
        """Verify and commit a single sequence token by token."""
        # Each token is committed before the distribution of the next position is computed.
        branches = proposals.branches()
        lengths = self.stats.rows[self.rows[0]]
        path = [0]
        while True:
            here = logits[:, path[-1] : path[-1] + 1]
            prefixes = self.committed.prefixes(self.rows)
            scores = self.distribution.scores(prefixes, here)
            token = take(scores, noise, len(path) - 1)
            value = int(token)
            position = branches.get((path[-1], value))
            # An accepted proposal is followed by another token of the round, unless the text ends with it.
            count = len(path) + (position is not None)
            if len(path) == 1:
                Outcome(plan, self.rows, proposals.num_nodes, [count]).add_to(self.stats)
            lengths[-1] = count
            self.committed.commit(self.rows, token, [1], here, scores, [[value]])
            if position is None or not self.committed.unfinished:
                break
            path.append(position)
        if proposals.parents is None:
            places = None
        else:
            places = torch.tensor([path])
        lengths[-1] = len(path)
        emitted = [len(path)]
        return Outcome(plan, self.rows, proposals.num_nodes, emitted, emitted, places)

    def _settle(self, outcome: Outcome, captured: Captured) -> None:
        """Bring the target's cache and the drafter's context up to the committed tokens; drop finished sequences."""
        kept = outcome.num_kept
        if self.step_outputs is not None:
            windows = sliding_windows(self.runner.cache, self.runner.target.text_config)
            self.step_outputs.add_block(self.runner.outputs, kept[0], windows, outcome.path)
        unfinished = self.committed.unfinished
        if unfinished or len(self.rows) == 1:
            if outcome.path is not None:
                captured = tuple(along(outcome.path, states) for states in captured)
            self.session.observe_block(captured, kept)
        staying = [self.rows.index(row) for row in unfinished]
        self.runner.commit(outcome.path, kept, outcome.num_proposed + 1, staying)
        if len(staying) < len(self.rows):
            self._keep_rows(staying)

    def _keep_rows(self, staying: list[int]) -> None:
        """Keep only these of the unfinished sequences, given by their places among them."""
        if staying and len(staying) < len(self.rows):
            self.session.select(staying)
        self.rows = [self.rows[index] for index in staying]

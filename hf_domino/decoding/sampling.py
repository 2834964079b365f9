"""The law of the next token: logits after `generate`'s processors and warpers, and how a token is taken from it.

Target and drafts go through the same class, so that both laws of the acceptance rule are processed alike, each position
with its own prefix.

Shapes: B rows, T tokens so far, N positions, M tokens behind the prefix, V vocabulary.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import product

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from hf_domino.decoding.stopping import KnownStops

# Look at the scores only: all positions of a block go through at once.
PREFIX_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
)
# Depend on which tokens came before, not on their order: all positions of a block go through at once, each with its own
# prefix filled up by tokens that are in it already.
SET_OF_PREFIX = (hf.RepetitionPenaltyLogitsProcessor,)
# Functions of prefix and scores alone: safe to run on drafted prefixes that may be rejected.
STATELESS = (
    *PREFIX_FREE,
    *SET_OF_PREFIX,
    hf.EncoderNoRepeatNGramLogitsProcessor,
    hf.EncoderRepetitionPenaltyLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.NoRepeatNGramLogitsProcessor,
    hf.PrefixConstrainedLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
    hf.WatermarkLogitsProcessor,
)
AT_ONCE = (*PREFIX_FREE, *SET_OF_PREFIX)


@dataclass(frozen=True)
class Prefixes:
    """The tokens so far of the rows that are still generated; rows differ in length.

    Args:
        ids (`torch.Tensor`): Ids `[B, T]`, each row from its first token on; what stands behind its length is anything.
        lengths (`list[int]`): Tokens of each row.
        rows (`list[int]`): Which row of the batch that `generate` was given each one is.
    """

    ids: torch.Tensor
    lengths: list[int]
    rows: list[int]

    @classmethod
    def of(cls, ids: torch.Tensor) -> Prefixes:
        """All rows of a batch `[B, T]`, equally long."""
        return cls(ids, [ids.shape[1]] * len(ids), list(range(len(ids))))

    @property
    def is_even(self) -> bool:
        """Whether all rows are equally long."""
        return min(self.lengths) == max(self.lengths)

    def last(self) -> torch.Tensor:
        """The last token of each row, `[B, 1]`."""
        if self.is_even:
            return self.ids[:, self.lengths[0] - 1 : self.lengths[0]]
        return self.ids.gather(1, torch.tensor(self.lengths, device=self.ids.device)[:, None] - 1)

    def filled(self, continuation: torch.Tensor, first: int) -> torch.Tensor:
        """The prefixes of successive positions, where it only matters which tokens are in them.

        Args:
            continuation (`torch.Tensor`): Tokens behind the prefixes, `[B, M]`.
            first (`int`): How many of them the first position sees; each next one sees one more, the last all.

        Returns:
            `torch.Tensor`: `[B, M - first + 1, T + M]`; a row's own last token stands in place of what is not there.
        """
        longest, count = max(self.lengths), continuation.shape[1]
        if first == count and self.is_even:
            return torch.cat((self.ids[:, :longest], continuation), dim=1)[:, None]
        ids, last = self.ids[:, :longest], self.last()
        if not self.is_even:
            there = torch.arange(longest) < torch.tensor(self.lengths)[:, None]
            ids = torch.where(there.to(ids.device), ids, last)
        num_positions = count - first + 1
        seen = torch.ones(num_positions, count, dtype=torch.bool, device=ids.device).tril(first - 1)
        tails = torch.where(seen, continuation[:, None], last[:, None])
        return torch.cat((ids[:, None].expand(-1, num_positions, -1), tails), dim=2)


class TokenLaw:
    """What `generate` would sample from, or take the most likely token of.

    Args:
        processors (`LogitsProcessorList`): Processors and warpers, in order.
        do_sample (`bool`): Whether tokens are sampled or the most likely is taken.
        stops ([`KnownStops`], *optional*): Where texts end: a caller's function is never asked what comes behind.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, stops: KnownStops | None = None):
        self.do_sample, self.processors, self.stops = do_sample, processors, stops or KnownStops()
        split = next((i for i in range(len(processors), 0, -1) if type(processors[i - 1]) not in PREFIX_FREE), 0)
        self._per_prefix = LogitsProcessorList(processors[:split])
        self._prefix_free = LogitsProcessorList(processors[split:])
        # Transformers' own processors know an answer for every prefix; a trie or a grammar may not.
        calls_back = any(type(processor) is hf.PrefixConstrainedLogitsProcessor for processor in self._per_prefix)
        self._asked_until = self.stops if calls_back else None

    @property
    def needs_prefix(self) -> bool:
        """Whether scores of a position depend on the tokens before it."""
        return len(self._per_prefix) > 0

    @property
    def may_keep_state(self) -> bool:
        """Whether a processor may remember its calls, so that it must see each committed position once, in order."""
        return bool(stateful_processors(self._per_prefix))

    def scores(self, prefixes: Prefixes, logits: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
        """Process logits of successive positions, each with its own prefix.

        Args:
            prefixes ([`Prefixes`]): B rows.
            logits (`torch.Tensor`): `[B, N, V]`.
            continuation (`torch.Tensor`): Tokens behind the prefixes, `[B, M]`; the last position sees all of them.

        Returns:
            `torch.Tensor`: Scores `[B, N, V]` in fp32.
        """
        scores = logits.float()
        if self._per_prefix and all(type(p) in AT_ONCE and _counts_last(p, prefixes) for p in self._per_prefix):
            filled = prefixes.filled(continuation, continuation.shape[1] - scores.shape[1] + 1)
            rows = [row for row in prefixes.rows for _ in range(scores.shape[1])]
            processors = self._for_rows(rows)
            scores = processors(filled.flatten(0, 1), scores.flatten(0, 1).clone()).view_as(scores)
        elif self._per_prefix:
            scores = self._one_by_one(prefixes, scores, continuation)
        if self._prefix_free:
            scores = self._prefix_free(prefixes.ids, scores.flatten(0, 1)).view_as(scores)
        return scores

    def _one_by_one(self, prefixes: Prefixes, scores: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
        """One call per position and length of prefix; scores behind the end of a text stay as they are."""
        result = scores.clone()
        first = continuation.shape[1] - scores.shape[1] + 1
        most = [continuation.shape[1]] * len(scores)
        if self._asked_until is not None:
            most = self._asked_until.num_open(prefixes.lengths, continuation)
        for length, position in product(sorted(set(prefixes.lengths)), range(scores.shape[1])):
            num_seen = first + position
            rows = [row for row, own in enumerate(prefixes.lengths) if own == length and num_seen <= most[row]]
            if rows:
                seen = torch.cat((prefixes.ids[rows, :length], continuation[rows, :num_seen]), dim=1)
                processors = self._for_rows([prefixes.rows[row] for row in rows])
                result[rows, position] = processors(seen, scores[rows, position])
        return result

    def _for_rows(self, rows: list[int]) -> LogitsProcessorList:
        return LogitsProcessorList(_for_rows(processor, rows) for processor in self._per_prefix)

    def choose(self, scores: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Take one token id `[...]` from scores `[..., V]`; where it samples, with this `noise`, or fresh one."""
        return sample(scores.softmax(dim=-1), noise) if self.do_sample else scores.argmax(dim=-1)


def stateful_processors(processors: LogitsProcessorList) -> list[str]:
    """Class names of the processors that may remember their calls: all that are not known to be functions."""
    return [type(processor).__name__ for processor in processors if type(processor) not in STATELESS]


def _counts_last(processor: LogitsProcessor, prefixes: Prefixes) -> bool:
    """Whether the last token of every prefix counts, so that filling up with it changes nothing."""
    ignored = getattr(processor, "prompt_ignore_length", None)
    if ignored is None:
        return True
    lengths = torch.tensor(prefixes.lengths, device=ignored.device if isinstance(ignored, torch.Tensor) else None)
    return bool((lengths > (ignored[prefixes.rows] if isinstance(ignored, torch.Tensor) else ignored)).all())


def _for_rows(processor: LogitsProcessor, rows: list[int]) -> LogitsProcessor:
    """A processor that treats the rows it is given as these rows of the batch; most treat all rows alike."""
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return hf.PrefixConstrainedLogitsProcessor(lambda index, ids: allowed(rows[index], ids), num_beams=1)
    if isinstance(processor, hf.EncoderNoRepeatNGramLogitsProcessor):
        own = copy.copy(processor)
        own.generated_ngrams, own.batch_size = [processor.generated_ngrams[row] for row in rows], len(rows)
        return own
    for field in ("prompt_ignore_length", "encoder_input_ids"):
        if isinstance(values := getattr(processor, field, None), torch.Tensor) and type(processor) in STATELESS:
            own = copy.copy(processor)
            setattr(own, field, values[rows])
            return own
    return processor


def sample(probs: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Draw an index `[...]` from probabilities or weights `[..., V]` by an exponential race.

    The same law as `torch.multinomial` without its host synchronisation; weights need not be normalised.

    Args:
        probs (`torch.Tensor`): `[..., V]`.
        noise (`torch.Tensor`, *optional*): Standard exponential, of the same shape; drawn here by default.
    """
    return (probs / (torch.empty_like(probs).exponential_() if noise is None else noise)).argmax(dim=-1)


def draft_law(law: TokenLaw, choice: str = "sampled") -> TokenLaw:
    """The law drafts are chosen from: the target's, less the processors that may keep state.

    Without those fewer drafts are accepted; the output is the target's own all the same.

    Args:
        law (`TokenLaw`): The target's law.
        choice (`str`, *optional*, defaults to `"sampled"`): Draw drafts where the target samples; `"greedy"` takes the
            most likely draft always. Verification is exact for both.
    """
    stateless: list[LogitsProcessor] = [processor for processor in law.processors if type(processor) in STATELESS]
    return TokenLaw(LogitsProcessorList(stateless), law.do_sample and choice == "sampled", law.stops)

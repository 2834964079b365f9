"""The law of the next token: logits after `generate`'s processors and warpers, and how a token is taken from it.

Target and drafts go through the same class, so that both laws of the acceptance rule are processed alike, each position
with its own prefix.

Shapes: B batch, T tokens so far, N positions, V vocabulary.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

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
# Functions of prefix and scores alone: safe to run on drafted prefixes that may be rejected. Any other processor may
# keep state, so it sees target logits only; drafts are then proposed without it, which costs acceptance, not exactness.
STATELESS = (
    *PREFIX_FREE,
    *SET_OF_PREFIX,
    hf.NoRepeatNGramLogitsProcessor,
    hf.NoBadWordsLogitsProcessor,
    hf.SequenceBiasLogitsProcessor,
    hf.MinLengthLogitsProcessor,
    hf.MinNewTokensLengthLogitsProcessor,
    hf.ForcedBOSTokenLogitsProcessor,
    hf.ForcedEOSTokenLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
    hf.SuppressTokensAtBeginLogitsProcessor,
    hf.ExponentialDecayLengthPenalty,
)

AT_ONCE = (*PREFIX_FREE, *SET_OF_PREFIX)


class TokenLaw:
    """What `generate` would sample from, or take the most likely token of.

    Args:
        processors (`LogitsProcessorList`): Processors and warpers, in order.
        do_sample (`bool`): Whether tokens are sampled or the most likely is taken.
    """

    def __init__(self, processors: LogitsProcessorList, do_sample: bool):
        self.do_sample = do_sample
        split = next((i for i in range(len(processors), 0, -1) if type(processors[i - 1]) not in PREFIX_FREE), 0)
        self._per_prefix = LogitsProcessorList(processors[:split])
        self._prefix_free = LogitsProcessorList(processors[split:])

    @property
    def needs_prefix(self) -> bool:
        """Whether scores of a position depend on the tokens before it."""
        return len(self._per_prefix) > 0

    def scores(self, prefix_ids: torch.Tensor, logits: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
        """Process logits of successive positions, each with its own prefix.

        Args:
            prefix_ids (`torch.Tensor`): Tokens before the first position, `[B, T]`.
            logits (`torch.Tensor`): `[B, N, V]`.
            continuation (`torch.Tensor`): Tokens of the positions but the last, `[B, N - 1]`.

        Returns:
            `torch.Tensor`: Scores `[B, N, V]` in fp32.
        """
        scores = logits.float()
        if self._per_prefix and scores.shape[1] == 1:
            scores = self._per_prefix(prefix_ids, scores[:, 0].clone())[:, None]
        elif self._per_prefix and all(type(p) in AT_ONCE for p in self._per_prefix):
            prefixes = _filled_prefixes(prefix_ids, continuation)
            scores = self._per_prefix(prefixes.flatten(0, 1), scores.flatten(0, 1).clone()).view_as(scores)
        elif self._per_prefix:
            ids, start = torch.cat((prefix_ids, continuation), dim=1), prefix_ids.shape[1]
            steps = range(scores.shape[1])
            scores = torch.stack([self._per_prefix(ids[:, : start + i], scores[:, i].clone()) for i in steps], dim=1)
        if self._prefix_free:
            scores = self._prefix_free(prefix_ids, scores.flatten(0, 1)).view_as(scores)
        return scores

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Take one token id `[...]` from scores `[..., V]`."""
        return sample(scores.softmax(dim=-1)) if self.do_sample else scores.argmax(dim=-1)


def _filled_prefixes(prefix_ids: torch.Tensor, continuation: torch.Tensor) -> torch.Tensor:
    """Prefixes of N positions, `[B, N, T + N - 1]`: in place of tokens not yet there the last of `prefix_ids`."""
    count = continuation.shape[1] + 1
    filler = prefix_ids[:, -1:, None].expand(-1, count, count - 1)
    there = torch.ones(count, count - 1, dtype=torch.bool, device=prefix_ids.device).tril(-1)
    tails = torch.where(there, continuation[:, None], filler)
    return torch.cat((prefix_ids[:, None].expand(-1, count, -1), tails), dim=2)


def sample(probs: torch.Tensor) -> torch.Tensor:
    """Draw an index `[...]` from probabilities or weights `[..., V]` by an exponential race.

    The same law as `torch.multinomial` without its host synchronisation; weights need not be normalised.
    """
    return (probs / torch.empty_like(probs).exponential_()).argmax(dim=-1)


def draft_law(law: TokenLaw, processors: LogitsProcessorList, sampled: bool = True) -> TokenLaw:
    """The law drafts are chosen from: the target's, less the processors that may keep state.

    Args:
        law (`TokenLaw`): The target's law.
        processors (`LogitsProcessorList`): The processors it was made from.
        sampled (`bool`, *optional*, defaults to `True`): Draw drafts where the target samples; False takes the most
            likely draft always. Verification is exact for both.
    """
    stateless: list[LogitsProcessor] = [processor for processor in processors if type(processor) in STATELESS]
    return TokenLaw(LogitsProcessorList(stateless), do_sample=law.do_sample and sampled)

"""Prompt lookup in addition to a drafter: a round can propose tokens from the text so far instead of drafting.

If the last tokens have occurred earlier in the text, the tokens that followed them there often follow again. Examples
are names, numbers and whole lines that an answer takes from its prompt. Looking them up takes almost no time, and a
long match predicts more tokens than a drafter can. The sequences of a batch read each other's texts, and with a
[`LookupMemory`] also those of earlier calls. The output does not change.

Of several matches, those that agree on the next token count together (SuffixDecoding, arXiv 2411.04975). A match that
is longer says more, but so do several that agree, and how much each is worth is learnt from the rounds.

Proposals are chains. Trees of all continuations that matches have would be accepted more often (1.36 tokens a forward
in place of 1.29, for held-out answers of SmolLM2-135M-Instruct with a memory of 300,000 tokens), but the time that a
CPU needs to verify a tree takes nearly all of it back.

Transformers' own prompt lookup, which works without a drafter, takes the first match of at most two tokens.

Shapes: B unfinished sequences, P proposals.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import torch
from transformers import GenerationConfig

from hf_domino.decoding.estimates import Acceptance
from hf_domino.decoding.lookup_memory import DEFAULT_TOKENS, LEAST_TOKENS, LookupMemory, check_memory
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.round import Offer, fitting_length
from hf_domino.decoding.token_ring import StoredSequence
from hf_domino.methods import DominoDraftModel

# Proposed tokens are grouped into classes by the length of the match before them and by the vote of all matches of at
# least this length. Each key is the smallest length of a class. The values are the first guesses of the acceptance
# rate, measured on held-out answers of SmolLM2-135M-Instruct, alone and with a memory of 900,000 tokens. One class
# before them is for proposals without a match.
#         one match:      agreed upon by     by most  by
#         near    far      two    three+              fewer
GUESSES = {
    2: (0.40, 0.20, 0.50, 0.75, 0.40, 0.20),
    3: (0.50, 0.28, 0.55, 0.80, 0.40, 0.20),
    4: (0.60, 0.37, 0.65, 0.85, 0.45, 0.22),
    5: (0.70, 0.50, 0.80, 0.90, 0.55, 0.25),
    7: (0.80, 0.60, 0.82, 0.90, 0.60, 0.30),
    9: (0.85, 0.68, 0.85, 0.95, 0.70, 0.30),
    13: (0.90, 0.85, 0.94, 0.95, 0.70, 0.30),
    32: (0.95, 0.90, 0.97, 0.97, 0.80, 0.40),
}
LENGTHS = tuple(GUESSES)
NEAR, FAR, TWO_AGREE, MORE_AGREE, MOST_AGREE, FEWER_AGREE = range(6)
MOST_SHARE = 0.7  # of the matches; from here on, most agree
NO_MATCH = 0  # the class of a proposal without a match
FIRST_RATES = (0.0, *(rate for rates in GUESSES.values() for rate in rates))
# Proposals per round if the drafter has a memory and the call does not say. In other texts than edits, 10 are as good:
# longer matches are too rare there to gain or to cost more than half a percent.
DEFAULT_LOOKUP_TOKENS = 32


class PromptLookup:
    """Proposes tokens from the text of each sequence, in the rounds of one call.

    Args:
        most (`int`): Maximum number of tokens to propose in a round; 0 to turn prompt lookup off.
        vocab_size (`int`): The number of ids that have logits. Ids from here on have none, and neither have negative
            ids, such as the placeholder of an image.
        lengths (`Sequence[int]`, *optional*): The numbers of tokens that a round may propose, ascending from 0 to
            `most`. In rounds of fixed shape these are few, because each is a shape of its own. Defaults to all.
        memory ([`LookupMemory`], *optional*): Texts to read besides those of the call, which are added to it. Defaults
            to a memory of the call's texts alone.
        max_length (`int`, *optional*): How long a sequence can become, if that is known.
    """

    # Returns the tokens of a sequence (by its index) from an index on. The code that runs the rounds sets it.
    read: Callable[[int, int], Sequence[int]]
    # How many tokens in front of each sequence are padding.
    padding: Sequence[int] | None = None

    def __init__(
        self,
        most: int,
        vocab_size: int,
        lengths: Sequence[int] | None = None,
        memory: LookupMemory | None = None,
        max_length: int | None = None,
    ):
        self.most = most
        self._last_id = vocab_size - 1
        self._lengths = lengths or range(most + 1)
        self._acceptance = Acceptance(len(FIRST_RATES), lambda lift: FIRST_RATES)
        self._rates = self._acceptance.rates()
        self._memory = memory
        self._is_kept = memory is not None
        self._max_length = max_length
        self._sequences: dict[int, StoredSequence] = {}

    @classmethod
    def of_call(
        cls, config: GenerationConfig, drafter: DominoDraftModel, vocab_size: int, is_fixed: bool = False
    ) -> PromptLookup:
        """Create the prompt lookup that the `prompt_lookup_num_tokens` of a call or the drafter's memory asks for.

        Args:
            config (`GenerationConfig`): The merged configuration of the call.
            drafter ([`DominoDraftModel`]): The drafter.
            vocab_size (`int`): The target's number of tokens.
            is_fixed (`bool`, *optional*, defaults to `False`): Whether rounds have a fixed shape. The size of the
                drafter's blocks, or that of its trees if it is larger, then limits the number of proposals.

        Raises:
            ValueError: If the drafter's `memory` is something else.
        """
        memory = drafter.memory
        check_memory(memory, "drafter.memory")
        most = config.prompt_lookup_num_tokens or (0 if memory is None else DEFAULT_LOOKUP_TOKENS)
        lengths: Sequence[int] = range(most + 1)
        if is_fixed:
            largest = drafter.config.most_verified
            lengths = sorted({fitting_length(length, largest) for length in range(largest + 1)}.intersection(lengths))
        return cls(lengths[-1], vocab_size, lengths, memory, config.max_length)

    def offer(self, prefixes: Prefixes, room: int, price: float) -> Offer | None:
        """Offer as many proposals as are worth their time; None if there are none.

        Args:
            prefixes ([`Prefixes`]): The tokens so far of the B sequences.
            room (`int`): How many tokens there is room for.
            price (`float`): How many tokens one more proposal must be expected to add, per sequence.
        """
        most = self._lengths[bisect.bisect(self._lengths, room) - 1]
        if not most:
            return None
        rows = prefixes.rows
        # All texts are stored before the first search, so that sequences read what others have just written.
        sequences = [self._stored(row, len(rows)) for row in rows]
        rates = self._rates
        least = price / len(rows)
        if len(self._lengths) <= self.most:  # proposals that are not worth their time fill up the length
            least = 0.0
        found = [self._vote(sequence, most, least) for sequence in sequences]
        reaches = [list(accumulate((rates[kind] for kind in classes), mul)) for _, classes in found]
        longest = max(map(len, reaches))
        promises = [
            sum(reach[place] for reach in reaches if place < len(reach)) / len(rows) for place in range(longest)
        ]
        length = next((place for place, promise in enumerate(promises) if promise < price), longest)
        length = self._lengths[bisect.bisect_left(self._lengths, length)]
        if not length:
            return None
        tokens = [_filled(row, length, 0) for row, _ in found]
        classes = [_filled(row, length, NO_MATCH) for _, row in found]
        return Offer(tokens, classes, 1.0 + sum(promises[:length]))

    def proposals(self, offer: Offer, prefixes: Prefixes) -> torch.Tensor:
        """The proposed tokens `[B, P]`."""
        # An id without logits is never the target's token. It is replaced by the first or the last id, which is also
        # unlikely to be accepted.
        return torch.tensor(offer.tokens).clamp(0, self._last_id).to(prefixes.ids.device, non_blocking=True)

    def observe(self, offer: Offer, num_emitted: Sequence[int]) -> None:
        """Learn from a round with such proposals how many tokens it emitted for each sequence, bonus token included."""
        self._acceptance.forget()
        for classes, count in zip(offer.classes, num_emitted, strict=True):
            self._acceptance.observe(classes, count - 1)
        self._rates = self._acceptance.rates()

    def finish(self, num_rows: int) -> None:
        """Store the last tokens of all sequences of the call, for later calls."""
        if self.most and self._is_kept:
            for row in range(num_rows):
                self._stored(row, num_rows)

    def _stored(self, row: int, num_rows: int) -> StoredSequence:
        """Store the text of a sequence so far."""
        if self._memory is None:
            size = DEFAULT_TOKENS
            if self._max_length is not None:
                size = min(max(num_rows * self._max_length, LEAST_TOKENS), DEFAULT_TOKENS)
            self._memory = LookupMemory(size)
        padding = 0 if self.padding is None else self.padding[row]
        sequence = self._sequences.get(row)
        if sequence is None:
            sequence = self._sequences[row] = self._memory.add(self.read(row, padding))
        else:
            self._memory.extend(sequence, self.read(row, padding + sequence.num_tokens))
        return sequence

    def _vote(self, sequence: StoredSequence, most: int, least: float) -> tuple[list[int], list[int]]:
        """Find the continuation of a sequence that its matches agree on.

        Args:
            sequence ([`StoredSequence`]): The sequence.
            most (`int`): Maximum number of tokens.
            least (`float`): Stop at a token whose chance to be accepted, with all before it, is less than this.

        Returns:
            `tuple`: The tokens, and the class of each.
        """
        memory = self._memory
        assert memory is not None
        ring = memory.ring
        rates = self._rates
        tokens: list[int] = []
        classes: list[int] = []
        with memory.lock:
            last = ring.last_place(sequence)
            span = len(self._sequences) * sequence.num_tokens
            # The length of each match, the slot that it begins to continue at, and the next slot.
            matches = [(length, slot, slot) for length, slot in memory.places(sequence)]
            chance = 1.0
            while matches and len(tokens) < most:
                is_near = ring.age(matches[0][1]) < span
                token, kind = _choose([(length, ring.token_of[slot]) for length, _, slot in matches], is_near, rates)
                chance *= rates[kind]
                if chance < least:
                    break
                tokens.append(token)
                classes.append(kind)
                following = []
                for length, start, slot in matches:
                    if ring.token_of[slot] != token:
                        continue
                    after = ring.after_of[slot]
                    if after:
                        following.append((length + 1, start, after - 1))
                    elif slot + 1 == last:  # the text so far goes on with what is proposed
                        following.append((length + 1, start, start))
                matches = following
        return tokens, classes


def _choose(votes: Sequence[tuple[int, int]], is_near: bool, rates: Sequence[float]) -> tuple[int, int]:
    """Choose the next token by the matches that have one.

    Args:
        votes (`Sequence[tuple[int, int]]`): The length of each match and its next token, the longest match first.
        is_near (`bool`): Whether the longest match is in a text of the call.
        rates (`Sequence[float]`): The acceptance rate of each class.

    Returns:
        `tuple`: The token that is most likely to be accepted, and its class.
    """
    counts: Counter[int] = Counter()
    best = (-1.0, 0, NO_MATCH)
    level = bisect.bisect(LENGTHS, votes[0][0]) - 1
    for place, (_, token) in enumerate(votes):
        counts[token] += 1
        if place + 1 < len(votes):
            next_level = bisect.bisect(LENGTHS, votes[place + 1][0]) - 1
        else:
            next_level = -1
        if next_level == level:
            continue
        # These are all matches of at least this length.
        top, count = counts.most_common(1)[0]
        kind = 1 + level * len(GUESSES[2]) + _agreement(count, place + 1, is_near)
        if rates[kind] > best[0]:
            best = (rates[kind], top, kind)
        level = next_level
    return best[1:]


def _agreement(count: int, total: int, is_near: bool) -> int:
    """The column of `GUESSES` for a token that `count` of `total` matches agree on."""
    if total == 1:
        return NEAR if is_near else FAR
    if count == total:
        return TWO_AGREE if count == 2 else MORE_AGREE
    return MOST_AGREE if count >= MOST_SHARE * total else FEWER_AGREE


def _filled(values: Sequence[int], length: int, filler: int) -> list[int]:
    """The first `length` values, with fillers after the end."""
    return [*values[:length], *[filler] * (length - len(values))]


def num_padding(input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int] | None:
    """Count the padding in front of each prompt; None if there is none.

    Args:
        input_ids (`torch.Tensor`): The prompts `[B, T]`.
        mask (`torch.Tensor`, *optional*): Their attention mask, 0 at padding. It also covers embeddings that have no
            ids.
    """
    if mask is None or mask.dim() != 2:
        return None
    first = (mask != 0).int().argmax(dim=1).tolist()
    num_embedded = max(mask.shape[1] - input_ids.shape[1], 0)
    return [max(count - num_embedded, 0) for count in first]

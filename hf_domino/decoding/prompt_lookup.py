"""Prompt lookup beside a drafter: a round may copy its proposals from the text so far, in place of drafting them.

Where the last tokens have stood before, what followed them there often follows again: names, numbers, whole lines that
an answer takes from its prompt. Copying costs no drafter, and a long match promises more than a drafter can. So a round
copies where its matches promise more tokens than drafts have brought of late, and than single steps would bring in the
time of a round. Under the coupled rule no copy changes the text; under the residual rule what is copied goes by the
text alone, so that a seed gives the same text again.

Transformers' own prompt lookup, without a drafter, takes the first match of at most two tokens.

Shapes: B rows still generated, P proposals.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import GenerationConfig

from hf_domino.configuration import DominoConfig
from hf_domino.decoding.drafting import DraftSession
from hf_domino.decoding.matches import GUESSES, Text, kind_of
from hf_domino.decoding.output import CommittedSequences
from hf_domino.decoding.pacing.blocks import Block, PacedBlock, fitting_length
from hf_domino.decoding.pacing.estimates import Acceptance, Tokens
from hf_domino.decoding.pacing.pacer import Pacer
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.residual.rule import ResidualRule
from hf_domino.decoding.tree.copies import CopyLanes
from hf_domino.decoding.tree.form import Tree
from hf_domino.decoding.verification import CoupledRule

DRAFT_TOKENS = 2.0  # of a drafted round, before there was one


class PromptLookup:
    """Proposals copied from the text of each row, for the rounds of one call.

    Args:
        committed ([`CommittedSequences`]): The texts.
        pacer ([`Pacer`]): What is known of the time of rounds.
        most (`int`): Most tokens to copy in a round; 0 for none at all.
        vocab_size (`int`): Ids from here on have no logits, nor have those below 0, such as a placeholder of an image.
        is_static (`bool`, *optional*, defaults to `False`): To copy one of a few lengths, as each is a shape of its
            own; `most` is one of them.
    """

    def __init__(
        self,
        committed: CommittedSequences,
        pacer: Pacer,
        most: int,
        vocab_size: int,
        is_static: bool = False,
    ):
        self.most, self._last_id = most, vocab_size - 1
        self._committed, self._pacer, self._is_static = committed, pacer, is_static
        self._acceptance, self._drafted = Acceptance(GUESSES.values()), Tokens()
        self._drafted.observe(DRAFT_TOKENS)
        self._texts: defaultdict[int, Text] = defaultdict(Text)

    @classmethod
    def of_call(
        cls, config: GenerationConfig, drafter_config: DominoConfig, committed: CommittedSequences, pacer: Pacer
    ) -> PromptLookup:
        """The lookup that a call's `prompt_lookup_num_tokens` asks for.

        Args:
            config (`GenerationConfig`): The merged configuration of the call.
            drafter_config ([`DominoConfig`]): In rounds of fixed shape no more can be copied than drafted.
            committed ([`CommittedSequences`]): The texts.
            pacer ([`Pacer`]): What is known of the time of rounds.
        """
        most, is_static = config.prompt_lookup_num_tokens or 0, config.cache_implementation == "static"
        if is_static:
            longest = drafter_config.num_draft_tokens
            lengths = {fitting_length(length, longest) for length in range(longest + 1)}
            most = max(length for length in lengths if length <= most)
        return cls(committed, pacer, most, drafter_config.vocab_size, is_static)

    def begin_round(self, prefixes: Prefixes, room: int) -> CopiedBlock | None:
        """A block to copy for these rows in place of drafting, `room` tokens at most; None where that promises more."""
        if not (most := min(self.most, room)):
            return None
        num_rows = len(prefixes.rows)
        texts = [self._text(row) for row in prefixes.rows]
        matches = [text.longest_match() for text in texts]
        block = CopiedBlock(self._acceptance, self._pacer.price(num_rows), [length for length, _ in matches])
        block.extend(most)
        if block.expected <= max(self._drafted.expected, self._pacer.cost(num_rows)):
            return None
        if self._is_static:
            block.extend(fitting_length(block.length, most), at_any_price=True)
        copies = [text.behind(end, block.length) for text, (_, end) in zip(texts, matches, strict=True)]
        # What has no logits is never the target's token, nor is the first or last one it is replaced by likely to be.
        block.proposals = torch.tensor(copies).clamp(0, self._last_id).to(prefixes.ids.device, non_blocking=True)
        return block

    def lanes(self, prefixes: Prefixes, room: int, num_drafted: int) -> CopyLanes | None:
        """Texts that a round's trees of these rows copy from, `room` tokens deep at most; None where they do not.

        Where no row's last tokens have stood before, no deeper than what is drafted: noise is drawn for all depths.
        """
        most = min(self.most, room)
        # Elsewhere what lanes end with would have to be waited for: rounds of trees and of copies take turns.
        if not most or self._is_static or not prefixes.ids.is_cpu:
            return None
        copies = CopyLanes([self._text(row) for row in prefixes.rows], most, self._last_id + 1)
        if copies.found(0) is None:
            copies.num_depths = min(most, num_drafted)
        return copies

    def observe(self, block: Block, num_committed: Sequence[int]) -> None:
        """Learn from a round: its block, the tokens it committed per row."""
        if isinstance(block, CopiedBlock):
            self._pacer.skip_round(len(num_committed))
            for match, kinds, count in zip(block.matches, block.kinds(), num_committed, strict=True):
                if match:
                    self._acceptance.observe(kinds, count - 1)
        elif not block.is_comparison:
            self._drafted.observe(sum(num_committed) / len(num_committed))

    def _text(self, row: int) -> Text:
        """The text of a row so far."""
        text = self._texts[row]
        text.extend(self._committed.tokens(row, len(text)))
        return text


class CopiedBlock(PacedBlock):
    """A block that is copied, as far as its matches make it worth its time.

    Args:
        acceptance ([`Acceptance`]): What is known of copied tokens.
        price (`float`): Tokens that one more proposal must bring, a row.
        matches (`list[int]`): Length of each row's match; 0 for none.
    """

    proposals: torch.Tensor  # [B, P]
    is_copied = True

    def propose(self, session: DraftSession, prefixes: Prefixes, most: int, rule: CoupledRule | ResidualRule) -> Tree:
        """The copied tokens, as a chain."""
        return Tree(self.proposals)

    def __init__(self, acceptance: Acceptance, price: float, matches: list[int]):
        super().__init__(acceptance, price, len(matches))
        self.matches = matches

    def teach(self, brought: Sequence[Sequence[int]]) -> list[int]:
        """All but the bonus tokens were copied."""
        return [len(tokens) - 1 for tokens in brought]

    def choose_length(self, room: int) -> int:
        """The length chosen when it was copied."""
        return self.length

    def extend(self, most: int, at_any_price: bool = False) -> None:
        """Copy as far as the next token is worth its time, `most` tokens at most."""
        while self.length < most:
            # Where all before a token are accepted, its match is longer by those.
            matches = [match + self.length if match else 0 for match in self.matches]
            kinds = [kind_of(match) for match in matches]
            if not at_any_price and self.promise(kinds) < self._price:
                break
            self.add(self.length, kinds)

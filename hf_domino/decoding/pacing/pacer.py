"""Pacing: how many tokens a round drafts, and whether it drafts at all.

One more proposal costs time, which is worth `tokens per second` times that time in tokens. It brings a token if it is
accepted with all before it. So a block goes on while the chance of that is above the price; both are learnt from the
rounds themselves: the chance from how sure the draft law was, the price from the clock.

Where rounds seem to bring less than single steps of the target would, rounds and single steps take turns, so that the
clock can compare neighbours; once that is sure, single steps are made, and drafting is tried again now and then. How
long it pauses goes by what its trial has cost.

Under the coupled rule no length changes the text. Under the residual rule it does: there a block ends by what was known
before its next token was drawn, so that the law is kept, and nominal costs stand and nothing is kept between calls, so
that a seed gives the same text again.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence

from torch import nn
from transformers import GenerationConfig

from hf_domino.decoding.pacing.blocks import Block, ConfidentBlock, PlannedBlock, SingleStep
from hf_domino.decoding.pacing.estimates import NOMINAL_PROPOSAL, Acceptance
from hf_domino.decoding.pacing.ways import Contest, Way
from hf_domino.decoding.tree.block import Trees
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.stats import Pause

# After how many rounds the first single steps are made to compare with, and from then on.
ROUNDS_PER_STEP = (3, 3, 6, 12, 64)
# Single steps after drafting has lost, for each step's worth that a round lost; twice as many each time.
PAUSE, MAX_PAUSE = 14, 224
EXPLORE_EVERY = 16  # blocks; one of them is whole where lengths are chosen by position
MIN_ROUNDS = 3  # before drafting may pause
DEFAULT_ASSISTANT_TOKENS = 20  # Transformers' own, for small models that draft token by token


class Pace:
    """Knowledge about drafting for a target in batches of one size.

    Args:
        acceptance ([`Acceptance`]): What is known of proposals.
        by_confidence (`bool`): Whether blocks are [`ConfidentBlock`]s or [`PlannedBlock`]s.
        is_timed (`bool`): Whether costs are measured; nominal otherwise.
        trees ([`Trees`], *optional*): What is known of trees, where they may be proposed.
    """

    def __init__(
        self,
        acceptance: Acceptance,
        by_confidence: bool = True,
        is_timed: bool = True,
        trees: Trees | None = None,
    ):
        self.acceptance, self.by_confidence, self.is_timed, self._trees = acceptance, by_confidence, is_timed, trees
        self._chains, self._branches, self._contest = Way(), Way(), Contest()
        self._last = self._chains  # way of the last round
        self._num_steps = 0
        self._pause = PAUSE  # single steps for each that is lost, after drafting has lost again
        self._why: Pause | None = None
        self.begin_call()

    def begin_call(self) -> None:
        """A call of `generate` begins: its text may be easier."""
        self._left = 0  # single steps until drafting is tried again
        self._rounds_since_step = 0
        self._is_first = True  # the first round of a call, which stores the prompt's context too
        self.part()

    def part(self) -> None:
        """Compare the next time with none before it."""
        for each in (self._chains.cost, self._branches.cost, self._contest):
            each.part()

    @property
    def way(self) -> Way:
        """How rounds propose, but for those that are made to compare."""
        if self._trees is None or not self._trees.is_optional:
            return self._last
        return self._branches if self._contest.prefers_trees else self._chains

    def _wants_trees(self) -> bool:
        """Whether the next round is to propose trees."""
        return self._trees is not None and (not self._trees.is_optional or self._contest.wants_trees())

    def begin_round(self, num_rows: int, may_branch: Callable[[], bool]) -> Block:
        """Choose what the next round drafts."""
        if self._left:
            self._left -= 1
            return SingleStep(self._why)
        if self._wants_step():
            return SingleStep()
        if self._trees is not None and self._wants_trees() and may_branch():
            return self._trees.block(self._branches.price)
        if self.by_confidence:
            return ConfidentBlock(self.acceptance, self._chains.price, num_rows)
        is_whole = self._chains.tokens.num_rounds % EXPLORE_EVERY == 0
        return PlannedBlock(self.acceptance, 0.0 if is_whole else self._chains.price, num_rows)

    def _wants_step(self) -> bool:
        """Whether to compare with a single step: now and then, and in doubt after every round."""
        wanted = ROUNDS_PER_STEP[min(self._num_steps, len(ROUNDS_PER_STEP) - 1)]
        tokens, cost = self.way.tokens, self.way.cost
        is_doubtful = tokens.num_rounds >= MIN_ROUNDS and tokens.expected < cost.typical
        return self.is_timed and self._rounds_since_step >= (1 if is_doubtful else wanted)

    def observe(self, block: Block, num_committed: Sequence[int], seconds: float) -> None:
        """Learn from a round: its block, the tokens it committed per row, its wall time."""
        if block.length:
            for kinds, count in zip(block.kinds(), num_committed, strict=False):
                self.acceptance.observe(kinds, count - 1)
            typical = seconds if self.is_timed and not self._is_first else None
            has_trees = block.tree_size is not None
            way = self._branches if has_trees else self._chains
            if way is not self._last:
                self._last.cost.part()
            way.tokens.observe(sum(num_committed) / len(num_committed))
            way.cost.observe(block.length, typical)
            self._contest.observe(has_trees, typical, block.gain)
            self._rounds_since_step, self._is_first, self._last = self._rounds_since_step + 1, False, way
            self._judge()
        else:
            self._last.cost.observe(0, seconds if self.is_timed else None)
            self._contest.part()
            self._num_steps, self._rounds_since_step = self._num_steps + 1, 0
            if block.is_comparison:
                self._judge()

    def _judge(self) -> None:
        """Pause drafting if it surely brings less than single steps in the same time, for longer each time."""
        tokens, cost = self.way.tokens, self.way.cost
        if tokens.num_rounds < MIN_ROUNDS or (self.is_timed and not cost.num_pairs):
            return
        if max(tokens.most, tokens.last) < cost.least:
            self._why = Pause(tokens.expected, cost.typical, cost.num_pairs)
            # Few readings of a clock, however bad, make a first pause no longer than one lost step does.
            lost = min(self._why.cost - self._why.tokens, self._pause / PAUSE)
            self._left, self._pause = math.ceil(self._pause * lost), min(2 * self._pause, MAX_PAUSE)
        elif tokens.expected >= cost.typical:
            self._pause = PAUSE


class Pacer:
    """Knowledge about drafting for a target: of proposals, and for each size of batch of costs.

    Args:
        num_positions (`int`, *optional*): Positions of a block, to choose lengths by; None to go by confidence.
        is_timed (`bool`): Whether costs are measured; nominal otherwise, and the same for all sizes.
        trees ([`Trees`], *optional*): What is known of trees, where they may be proposed.
    """

    def __init__(self, num_positions: int | None, is_timed: bool, trees: Trees | None = None):
        self._by_confidence, self._is_timed, self._trees = num_positions is None, is_timed, trees
        self.acceptance = Acceptance.by_confidence() if num_positions is None else Acceptance.by_position(num_positions)
        self._paces: dict[int, Pace] = {}

    def begin_call(self) -> None:
        """A call of `generate` begins."""
        for pace in self._paces.values():
            pace.begin_call()

    def _pace(self, num_rows: int) -> Pace:
        key = num_rows if self._is_timed else 0
        if key not in self._paces:
            self._paces[key] = Pace(self.acceptance, self._by_confidence, self._is_timed, self._trees)
        return self._paces[key]

    def begin_round(self, num_rows: int, may_branch: Callable[[], bool] = bool) -> Block:
        """Choose what the next round drafts for this many rows; asks whether it may be a tree where that is wanted."""
        return self._pace(num_rows).begin_round(num_rows, may_branch)

    def observe(self, block: Block, num_committed: Sequence[int], seconds: float) -> None:
        """Learn from a round: its block, the tokens it committed per row, its wall time."""
        self._pace(len(num_committed)).observe(block, num_committed, seconds)

    def skip_round(self, num_rows: int) -> None:
        """A round was made for this many rows that it did not choose."""
        self._pace(num_rows).part()

    def cost(self, num_rows: int) -> float:
        """Time of a round for this many rows, in single steps."""
        return self._pace(num_rows).way.cost.typical

    def price(self, num_rows: int) -> float:
        """Tokens a row that the time of one more proposal is worth: nominal, before it is known."""
        way = self._pace(num_rows).way
        return way.price or NOMINAL_PROPOSAL * way.cost.typical


class WholeBlocks(Pacer):
    """Always drafts as far as the drafter goes, or trees of the same size by what is known at first."""

    def __init__(self, trees: Trees | None = None) -> None:
        super().__init__(None, is_timed=False, trees=trees)

    def begin_round(self, num_rows: int, may_branch: Callable[[], bool] = bool) -> Block:
        """A whole block."""
        return self._trees.block() if self._trees is not None and may_branch() else Block()

    def observe(self, block: Block, num_committed: Sequence[int], seconds: float) -> None:
        """Learn nothing."""


_learnt = threading.local()


def most_proposals(drafter: DominoDraftModel, target: nn.Module, config: GenerationConfig) -> int:
    """Most drafted proposals of a round: what the drafter makes, or fewer where `num_assistant_tokens` was set to that.

    `generate` fills in a default where it was not. Nothing tells that from the same number among the arguments of a
    call, which then counts in the target's own generation configuration only.

    Args:
        drafter ([`DominoDraftModel`]): The drafter.
        target (`nn.Module`): The target.
        config (`GenerationConfig`): The merged configuration of the call.
    """
    wanted = config.num_assistant_tokens
    is_set = getattr(getattr(target, "generation_config", None), "num_assistant_tokens", None) is not None
    if wanted is None or (wanted == DEFAULT_ASSISTANT_TOKENS and not is_set):
        return drafter.config.num_draft_tokens
    return min(wanted, drafter.config.num_draft_tokens)


def pacer_for(
    drafter: DominoDraftModel,
    target: nn.Module,
    num_draft_tokens: int,
    do_sample: bool,
    by_confidence: bool,
    is_static: bool = False,
) -> Pacer:
    """The pacer of a call of `generate`, with what the calling thread knows from earlier ones that chose alike.

    Args:
        drafter ([`DominoDraftModel`]): Its `draft_length` says whether blocks are paced at all.
        target (`nn.Module`): The target.
        num_draft_tokens (`int`): Most proposals of a round.
        do_sample (`bool`): Whether the target samples.
        by_confidence (`bool`): Whether the host can read confidences at no cost, which it can on a CPU only.
        is_static (`bool`, *optional*, defaults to `False`): Whether rounds are of fixed shape, where chains and trees
            would be captured and compiled each.
    """
    config = drafter.config
    config.check()  # a field may have been set since
    is_fixed = is_static or config.draft_length == "full"
    size = config.fixed_tree_size if is_fixed else config.draft_tree_size
    trees = None if size is None else Trees(size)
    if config.draft_length == "full":
        return WholeBlocks(trees)
    num_positions = None if by_confidence else num_draft_tokens
    if do_sample and config.acceptance_rule == "residual":
        return Pacer(num_positions, is_timed=False)
    if not hasattr(_learnt, "by_drafter"):
        _learnt.by_drafter = weakref.WeakKeyDictionary()
    pacers = _learnt.by_drafter.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
    key = (by_confidence, num_draft_tokens, do_sample, size)
    pacer = pacers.setdefault(key, Pacer(num_positions, is_timed=True, trees=trees))
    pacer.begin_call()
    return pacer

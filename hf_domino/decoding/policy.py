"""The policy of rounds: which arm the next one plays, by what each brought and cost of late.

Arms are a single step of the target, chains of a few lengths, a tree, and a copy where the text offers one. Of those
that draft, the best by tokens per time is played, each taken a standard deviation better than what was seen (optimism
under uncertainty): whole blocks come first. Drafting pauses where single steps are to bring more. While they may not, a
text drafts on credit: a few single steps, which lost time is taken from and won time goes back to (a CUSUM test).

No arm changes the text.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import GenerationConfig

from hf_domino.decoding.estimates import DOUBT, NOMINAL_PROPOSAL, Acceptance, Costs
from hf_domino.decoding.prompt_lookup import Offer
from hf_domino.decoding.round import STEP, Arm, Outcome, Plan
from hf_domino.methods import DominoDraftModel
from hf_domino.statistics.stats import Pause

SHORT_CHAINS = (2, 4)
ADAPTIVE_SIZE = 16  # nodes of a tree that paid most where trees were measured
CHAINS_FIRST = 24  # rounds: in a short text trees have nothing to win, and each target must be tried with one
# Single steps that a text may lose by drafting in doubt, such as two rounds that bring nothing; and the share of its
# time that it may on top: a trial in some 150 tokens, so that a drafter that never pays costs less than a hundredth.
CREDIT = 2.0
CREDIT_SHARE = 0.005
# Rounds between single steps that are made for their time, where it is in doubt whether drafting pays, and else: what
# they lose is little where it is, and a hundredth of a text of 128 tokens where it is not.
GAP = 2
LONG_GAP = 64
DEFAULT_ASSISTANT_TOKENS = 20  # Transformers' own, for small models that draft token by token
COPY = Arm(1, is_copied=True)


@dataclass
class _Known:
    """What is known of batches of one size.

    Args:
        costs ([`Costs`]): Of arms.
    """

    costs: Costs
    pause: Pause | None = None  # the one that drafting is in
    num_drafted: int = 0  # rounds
    rounds_since_step: int = 0
    most_credit: float = CREDIT  # single steps that the text may lose
    credit: float = CREDIT  # what is left of it


class Policy:
    """Chooses the arm of every round.

    Args:
        most (`int`): Proposals of a whole chain.
        tree_size (`int` or `str`, *optional*): Most nodes of a tree, `"adaptive"` for chains or trees; None for chains.
        is_full (`bool`, *optional*, defaults to `False`): Whether only whole blocks, or trees as deep, are drafted.
    """

    def __init__(self, most: int, tree_size: int | str | None = None, is_full: bool = False):
        self._is_full = is_full
        self._is_optional = isinstance(tree_size, str)
        size = ADAPTIVE_SIZE if isinstance(tree_size, str) else tree_size
        self._whole = Arm(most)
        if is_full:
            self._chains = [self._whole]
        else:
            self._chains = [*(Arm(n) for n in SHORT_CHAINS if n < most), self._whole]
        self._tree = None if size is None else Arm(most, size)
        self._acceptance = Acceptance(most)
        self._branching = Acceptance(most, self._acceptance.rates if self._is_optional else None)
        self._known: dict[int, _Known] = {}
        self._is_first = True  # the first drafted round of a call, which stores the prompt's context too

    def begin_call(self) -> None:
        """A call of `generate` begins."""
        self._is_first = True
        for known in self._known.values():
            # Debts are of one text. Where drafting did not pay, the next text is tried for less.
            known.credit = known.most_credit = known.most_credit / 2 if known.pause else CREDIT
            known.pause = None

    def price(self, num_rows: int) -> float:
        """Tokens per row that the time of one more proposal is worth."""
        known = self._known_of(num_rows)
        return NOMINAL_PROPOSAL * max(self._value(known, self._whole), 1.0)

    def plan(self, num_rows: int, room: int, offer: Offer | None = None, may_branch: Callable[[], bool] = bool) -> Plan:
        """Choose what the next round proposes.

        Args:
            num_rows (`int`): Rows of the batch.
            room (`int`): Most tokens of a path that there is room for.
            offer ([`Offer`], *optional*): What can be copied from the text.
            may_branch (`Callable`, *optional*): Called when a tree is wanted: whether the round may be one.
        """
        if not room:
            return Plan(STEP, 0)
        known = self._known_of(num_rows)
        best = self._best(known, self._drafting(known, may_branch))
        if not self._is_full and not self._pays(known, best):
            known.pause = known.pause or self._pause(known, best)
            favourite = STEP
        else:
            favourite = best
            known.pause = None
            if not self._is_full and self._wants_step(known, best):
                return Plan(STEP, 0, is_comparison=True)
        if offer is not None and offer.expected > self._value(known, favourite) * known.costs.of(COPY, offer.length):
            return Plan(COPY, offer.length, offer)
        return Plan(
            favourite,
            min(favourite.length, room),
            pause=known.pause,
            least_chance=0.0 if self._is_full else NOMINAL_PROPOSAL,  # a node that costs more than it brings
        )

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Learn from a round and its wall time."""
        arm = outcome.plan.arm
        known = self._known_of(len(outcome.rows))
        if arm.is_copied:
            num_proposals = outcome.num_proposed
        else:
            num_proposals = self._width(arm)
        if arm is not STEP:
            known.rounds_since_step = known.rounds_since_step + 1
        else:
            known.rounds_since_step = 0
        is_trusted = self._value(known, arm) > 1
        for acceptance in (self._acceptance, self._branching) if self._tree else (self._acceptance,):
            acceptance.forget()
        if arm.is_drafted:
            if arm.tree_size is None:
                acceptance = self._acceptance
            else:
                acceptance = self._branching
            for count in outcome.num_brought:
                acceptance.observe(range(outcome.plan.length), count - 1)
        is_typical = not arm.is_drafted or (outcome.plan.length == arm.length and not self._is_first)
        if not self._is_full and is_typical:
            known.costs.observe(arm, num_proposals, seconds)
        cost = known.costs.of(arm, num_proposals)
        known.credit += CREDIT_SHARE * cost
        if arm.is_drafted:
            self._is_first = False
            known.num_drafted = known.num_drafted + 1
            # Rounds that were to pay make no debts: these are of trials.
            if is_trusted:
                least = min(known.credit, 0.0)
            else:
                least = -math.inf
            known.credit = min(max(known.credit + outcome.tokens - cost, least), known.most_credit)

    def _wants_step(self, known: _Known, favourite: Arm) -> bool:
        """Whether to make a single step to measure its time: once at first, then often where that is in doubt."""
        ahead = math.log(self._value(known, favourite))
        doubt = known.costs.doubt(favourite)
        num_readings = known.costs.num_readings[STEP]
        # A time that was read once or twice may be the machine's hiccup.
        is_sure = num_readings > 0 and ahead > doubt + DOUBT / num_readings
        return known.rounds_since_step >= (1 if ahead < 0 else LONG_GAP if is_sure else GAP)

    def _pays(self, known: _Known, arm: Arm) -> bool:
        """Whether a round of an arm is to bring more than single steps, or may do so and there is credit for it."""
        if known.credit <= 0:
            return self._value(known, arm) > 1
        return self._value(known, arm, 1.0) * math.exp(known.costs.doubt(arm)) > 1

    def _pause(self, known: _Known, best: Arm) -> Pause:
        """Why drafting pauses."""
        readings = known.costs.num_readings
        if readings[STEP]:
            num_timed = sum(count for arm, count in readings.items() if arm.is_drafted)
        else:
            num_timed = 0
        return Pause(self._tokens(best), known.costs.of(best, self._width(best)), num_timed)

    def _drafting(self, known: _Known, may_branch: Callable[[], bool]) -> list[Arm]:
        """Arms that draft."""
        if self._tree is None or (self._is_optional and known.num_drafted < CHAINS_FIRST) or not may_branch():
            return self._chains
        if self._is_optional:
            return [*self._chains, self._tree]
        return [self._tree]

    def _best(self, known: _Known, arms: list[Arm]) -> Arm:
        """The best of some arms, each at a standard deviation above what was seen."""
        return max(arms, key=lambda arm: self._value(known, arm, 1.0) * math.exp(known.costs.doubt(arm)))

    def _value(self, known: _Known, arm: Arm, lift: float = 0.0) -> float:
        """Tokens in the time of a single step."""
        return self._tokens(arm, lift) / known.costs.of(arm, self._width(arm))

    def _tokens(self, arm: Arm, lift: float = 0.0) -> float:
        return (self._acceptance if arm.tree_size is None else self._branching).tokens(arm.length, lift)

    @staticmethod
    def _width(arm: Arm) -> int:
        """Proposals that are verified."""
        return arm.tree_size or arm.length

    def _known_of(self, num_rows: int) -> _Known:
        if num_rows not in self._known:
            if self._known:
                like = next(reversed(self._known.values())).costs
            else:
                like = None
            arms = [*self._chains, *([self._tree] if self._tree else []), COPY]
            self._known[num_rows] = _Known(Costs(arms, like))
        return self._known[num_rows]


_learnt = threading.local()


def most_proposals(drafter: DominoDraftModel, target: nn.Module, config: GenerationConfig) -> int:
    """Most drafted proposals of a round: what the drafter makes, or fewer where `num_assistant_tokens` was set to that.

    `generate` fills in a default of 20 where it was not. An argument of 20 looks the same, so 20 counts in the target's
    own generation configuration only.

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


def policy_for(
    drafter: DominoDraftModel, target: nn.Module, most: int, do_sample: bool, is_static: bool = False
) -> Policy:
    """The policy of a call of `generate`, with what this thread learnt in earlier calls of the same settings.

    Args:
        drafter ([`DominoDraftModel`]): Its `draft_length` says whether whole blocks are all that is drafted.
        target (`nn.Module`): The target.
        most (`int`): Most proposals of a path.
        do_sample (`bool`): Whether the target samples.
        is_static (`bool`, *optional*, defaults to `False`): Whether rounds are of fixed shape, where every length
            and tree would be captured and compiled on its own.
    """
    config = drafter.config
    config.check()  # a field may have been set since
    is_full = config.draft_length == "full"
    if is_static or is_full:
        size = config.fixed_tree_size
    else:
        size = config.draft_tree_size
    if is_full:
        return Policy(most, size, is_full=True)
    if not hasattr(_learnt, "by_drafter"):
        _learnt.by_drafter = weakref.WeakKeyDictionary()
    policies = _learnt.by_drafter.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
    # Rounds of fixed shape have other costs.
    policy = policies.setdefault((most, do_sample, size, is_static), Policy(most, size))
    policy.begin_call()
    return policy

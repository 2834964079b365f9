"""The policy of rounds: which arm the next one plays, by what each brought and cost of late.

Arms are a single step of the target, chains of a few lengths, a tree, and a copy where the text offers one. The best by
tokens per time is played: whole blocks come first, and drafting pauses once it is sure that single steps bring more.
Another arm is tried where it may still be better, as long as trials lose little.

Under the coupled rule no arm changes the text. Under the residual rule it does. There an arm is chosen before its
tokens are drawn, which keeps the law. Costs are nominal and nothing is kept between calls, so a seed gives the same
text again.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn
from transformers import GenerationConfig

from hf_domino.decoding.copies import Offer
from hf_domino.decoding.estimates import NOMINAL_PROPOSAL, Acceptance, Costs
from hf_domino.decoding.round import STEP, Arm, Outcome, Plan
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.stats import Pause

SHORT_CHAINS = (2, 4)
ADAPTIVE_SIZE = 16  # nodes of a tree that paid most where trees were measured
BRANCHES_SAVE = 0.25  # share of a chain's rejections that a tree's branches avoid, before it is known
CHAINS_FIRST = 24  # rounds: in a short text trees have nothing to win
# Single steps that a text may lose by trials and by drafting in doubt, and share of its time that it may on top.
LOSS, LOST_SHARE = 2.0, 0.009
SURE_BY = 1.5  # standard errors by which drafting must lose before it pauses, and may be better where it is tried
FIRST_GAP, MOST_GAP = 2, 64  # rounds between single steps that are made for their time: twice as many after each
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
    gap: int = FIRST_GAP  # rounds between single steps that are made for their time
    rounds_since_step: int = 0
    num_hard: int = 0  # texts in a row at whose end drafting was paused
    time: float = 0.0  # of the call's rounds, in single steps
    lost: float = 0.0  # by trials, and by drafting until it paused
    losing: float = 0.0  # by drafting of late
    rival: float = 0.0  # in a trial, tokens per time of the favourite that it replaces
    num_drafted: int = 0
    is_doubtful: bool = False  # whether the last single step's time was a surprise


class Policy:
    """Chooses the arm of every round.

    Args:
        most (`int`): Proposals of a whole chain.
        tree_size (`int` or `str`, *optional*): Most nodes of a tree, `"adaptive"` for chains or trees; None for chains.
        is_timed (`bool`, *optional*, defaults to `True`): Whether costs are measured; nominal otherwise.
        is_full (`bool`, *optional*, defaults to `False`): Whether only whole blocks, or trees as deep, are drafted.
    """

    def __init__(self, most: int, tree_size: int | str | None = None, is_timed: bool = True, is_full: bool = False):
        self._is_timed, self._is_full, self._is_optional = is_timed and not is_full, is_full, isinstance(tree_size, str)
        size = ADAPTIVE_SIZE if isinstance(tree_size, str) else tree_size
        self._whole = Arm(most)
        self._chains = [self._whole] if is_full else [*(Arm(n) for n in SHORT_CHAINS if n < most), self._whole]
        self._tree = None if size is None else Arm(most, size)
        self._acceptance = Acceptance(most)
        self._branching = Acceptance(most, self._branches_guessed if self._is_optional else None)
        self._known: dict[int, _Known] = {}
        self._arms = self._chains  # that may draft the round
        self._is_first = True  # the first drafted round of a call, which stores the prompt's context too

    def begin_call(self) -> None:
        """A call of `generate` begins."""
        self._is_first = True
        for known in self._known.values():
            # Debts are of one text. Where drafting did not pay, the next text is tried for less.
            known.num_hard = known.num_hard + 1 if known.pause else 0
            known.time = known.lost = known.losing = 0.0
            known.pause = known.pause and replace(known.pause, num_steps=0)  # the call before keeps its own

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
        self._arms = self._drafting(known, may_branch)
        favourite, known.rival = STEP if known.pause else self._best(known), 0.0
        value = self._value(known, favourite)
        if self._is_timed and known.pause is None and self._wants_step(known, favourite):
            return Plan(STEP, 0, is_comparison=True)
        if offer is not None and offer.expected > value * known.costs.of(COPY, offer.length):
            return Plan(COPY, offer.length, offer)
        if not self._is_full and (trial := self._trial(known, favourite)) is not None:
            favourite, known.rival = trial, value
        return Plan(
            favourite,
            min(favourite.length, room),
            pause=known.pause if favourite is STEP else None,
            least_chance=0.0 if self._is_full else NOMINAL_PROPOSAL,  # a node that costs more than it brings
        )

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Learn from a round and its wall time."""
        arm, known = outcome.plan.arm, self._known_of(len(outcome.rows))
        num_proposals = outcome.num_proposed if arm.is_copied else self._width(arm)
        cost = known.costs.of(arm, num_proposals)
        known.time += cost
        known.rounds_since_step = known.rounds_since_step + 1 if arm is not STEP else 0
        if outcome.plan.is_comparison:
            known.gap = min(2 * known.gap, MOST_GAP)
        for acceptance in (self._acceptance, self._branching) if self._tree else (self._acceptance,):
            acceptance.forget()
        if arm.is_drafted:
            acceptance = self._acceptance if arm.tree_size is None else self._branching
            for count in outcome.num_brought:
                acceptance.observe(range(outcome.plan.length), count - 1)
        is_typical = not arm.is_drafted or (outcome.plan.length == arm.length and not self._is_first)
        if self._is_timed and is_typical:
            surprises = known.costs.observe(arm, num_proposals, seconds)
            if arm is STEP and surprises:  # the machine's pace was taken for an arm's cost, or the other way round
                known.gap = FIRST_GAP
            known.is_doubtful = surprises if arm is STEP else known.is_doubtful
        if arm.is_drafted:
            self._is_first, known.num_drafted = False, known.num_drafted + 1
            if known.rival:
                known.lost = max(known.lost + cost - outcome.tokens / known.rival, 0.0)
            else:
                known.losing = max(known.losing + cost - outcome.tokens, 0.0)
        if (arm.is_drafted or outcome.plan.is_comparison) and not self._is_full:
            self._judge(known)

    def _wants_step(self, known: _Known, favourite: Arm) -> bool:
        """Whether to make a single step to measure its time: once at first, then often where that is in doubt."""
        ahead, doubt = math.log(self._value(known, favourite)), known.costs.doubt(favourite, STEP)
        is_sure = ahead > SURE_BY * doubt and not known.is_doubtful and known.costs.num_readings[STEP]
        return known.rounds_since_step >= (1 if ahead < 0 else MOST_GAP if is_sure else known.gap)

    def _judge(self, known: _Known) -> None:
        """Pause drafting where it surely brings less than single steps in the same time, or go on with it."""
        best = self._best(known)
        ahead, doubt = self._ahead(known, best, STEP)
        if known.pause is None and (ahead < -SURE_BY * doubt or (ahead < 0 and known.losing > LOSS)):
            known.lost, known.losing = known.lost + known.losing, 0.0
        elif known.pause is None or ahead > 0:
            known.pause = None
            return
        cost, readings = known.costs.of(best, self._width(best)), known.costs.num_readings
        num_timed = sum(count for arm, count in readings.items() if arm.is_drafted) if readings[STEP] else 0
        known.pause = Pause(self._tokens(best), cost, num_timed)

    def _trial(self, known: _Known, favourite: Arm) -> Arm | None:
        """The arm to try in place of the favourite, if one may well be better."""
        allowed = LOST_SHARE * known.time - known.lost
        if known.pause:
            allowed += LOSS / math.sqrt(1 + known.num_hard)
        if allowed <= 0:
            return None
        lift, found = 0.0 if known.pause else 1.0, list[Arm]()
        value, most = self._value(known, favourite, lift), self._value(known, favourite, SURE_BY)
        for arm in self._arms:
            cost, doubt = known.costs.of(arm, self._width(arm)), known.costs.doubt(arm, favourite)
            hope = self._tokens(arm, SURE_BY) / (cost * math.exp(-SURE_BY * doubt))
            if arm is not favourite and hope > most and cost - self._tokens(arm, lift) / value <= allowed:
                found.append(arm)
        return min(found, key=lambda arm: known.costs.num_readings[arm], default=None)

    def _drafting(self, known: _Known, may_branch: Callable[[], bool]) -> list[Arm]:
        """Arms that draft."""
        if self._tree is None or (self._is_optional and known.num_drafted < CHAINS_FIRST) or not may_branch():
            return self._chains
        return [*self._chains, self._tree] if self._is_optional else [self._tree]

    def _best(self, known: _Known) -> Arm:
        """The best drafting arm at acceptance a standard deviation above what was seen: whole blocks at first."""
        return max(self._arms, key=lambda arm: self._value(known, arm, 1.0))

    def _ahead(self, known: _Known, arm: Arm, other: Arm) -> tuple[float, float]:
        """Logarithm of how much better an arm is than another one, and the standard error of that."""
        ahead = math.log(self._value(known, arm) / self._value(known, other))
        lifts = [math.log(self._tokens(one, 1.0) / self._tokens(one)) for one in (arm, other)]
        return ahead, math.hypot(known.costs.doubt(arm, other), lifts[0] - lifts[1])

    def _value(self, known: _Known, arm: Arm, lift: float = 0.0) -> float:
        """Tokens in the time of a single step."""
        return self._tokens(arm, lift) / known.costs.of(arm, self._width(arm))

    def _tokens(self, arm: Arm, lift: float = 0.0) -> float:
        return (self._acceptance if arm.tree_size is None else self._branching).tokens(arm.length, lift)

    def _branches_guessed(self, lift: float) -> list[float]:
        """First guesses of acceptance rates in a tree, whose branches avoid some of a chain's rejections."""
        return [1 - (1 - BRANCHES_SAVE) * (1 - rate) for rate in self._acceptance.rates(lift)]

    @staticmethod
    def _width(arm: Arm) -> int:
        """Proposals that are verified."""
        return arm.tree_size or arm.length

    def _known_of(self, num_rows: int) -> _Known:
        if num_rows not in self._known:
            like = next(reversed(self._known.values())).costs if self._known else None
            arms = [*self._chains, *([self._tree] if self._tree else []), COPY]
            self._known[num_rows] = _Known(Costs(arms, not self._is_timed, like))
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
    size = config.fixed_tree_size if is_static or is_full else config.draft_tree_size
    if is_full or (do_sample and config.acceptance_rule == "residual"):
        return Policy(most, size, is_timed=False, is_full=is_full)
    if not hasattr(_learnt, "by_drafter"):
        _learnt.by_drafter = weakref.WeakKeyDictionary()
    policies = _learnt.by_drafter.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
    # Rounds of fixed shape have other costs.
    policy = policies.setdefault((most, do_sample, size, is_static), Policy(most, size))
    policy.begin_call()
    return policy

"""The policy of rounds: which arm the next one plays, by what each brought and cost of late.

Arms are a single step of the target, chains of a few lengths, a tree, and a copy where the text offers one. The best by
tokens per time is played: whole blocks come first, and drafting pauses once it is sure that single steps bring more.
Another arm is tried where it could be better for all that is known, as long as trials lose little.

Under the coupled rule no arm changes the text. Under the residual rule it does: there an arm is chosen by what was
known before its tokens were drawn, so that the law is kept, and nominal costs stand and nothing is kept between calls,
so that a seed gives the same text again.
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
from hf_domino.decoding.estimates import NOMINAL_PROPOSAL, Costs, PositionAcceptance
from hf_domino.decoding.round import STEP, Arm, Outcome, Plan
from hf_domino.drafter.modeling import DominoDraftModel
from hf_domino.drafter.stats import Pause

SHORT_CHAINS = (2, 4)
ADAPTIVE_SIZE = 16  # nodes of a tree that paid most where trees were measured
LEAST_CHANCE = 0.03  # of a node that a CPU verifies: what it costs, in tokens
FIRST_LOSS, LOSS = 2.0, 0.009  # steps, and share of the time, that trials may lose
PATIENCE = 4.0  # steps that drafting may lose while it is in doubt whether it pays
SURE_BY = 1.0  # standard errors by which drafting must lose before it pauses
HOPE = 2.0  # standard errors by which an arm may be better than it seems, where it is tried
# Rounds after which a single step is made for the sake of its time, each time so many times as many, up to the most.
FIRST_GAP, GAP_GROWTH, MOST_GAP = 2, 2, 64
CHAINS_FIRST = 24  # rounds: in a short text trees have nothing to win
DEFAULT_ASSISTANT_TOKENS = 20  # Transformers' own, for small models that draft token by token
COPY = Arm(1, is_copied=True)


@dataclass
class _Pace:
    """What is known of batches of one size.

    Args:
        costs ([`Costs`]): Of arms.
    """

    costs: Costs
    pause: Pause | None = None  # that drafting is in
    gap: int = FIRST_GAP  # rounds between single steps that are made for their time
    rounds_since_step: int = 0
    time: float = 0.0  # of all rounds, in single steps
    lost: float = 0.0  # by trials, and by drafting until it paused
    losing: float = 0.0  # by drafting of late
    rival: float = 0.0  # tokens per time of the arm that would be played, of a trial
    num_drafted: int = 0
    is_doubtful: bool = False  # whether the last single step's time was a surprise


class Policy:
    """Chooses the arm of every round.

    Args:
        most (`int`): Proposals of a whole chain.
        tree_size (`int` or `str`, *optional*): Most nodes of a tree, `"adaptive"` for chains or trees; None for chains.
        is_timed (`bool`, *optional*, defaults to `True`): Whether costs are measured; nominal otherwise.
        is_full (`bool`, *optional*, defaults to `False`): Whether all that is drafted is whole blocks, or such trees.
    """

    def __init__(self, most: int, tree_size: int | str | None = None, is_timed: bool = True, is_full: bool = False):
        self._is_timed, self._is_full, self._is_optional = is_timed and not is_full, is_full, isinstance(tree_size, str)
        size = ADAPTIVE_SIZE if isinstance(tree_size, str) else tree_size
        self._whole = Arm(most)
        self._chains = [self._whole] if is_full else [*(Arm(n) for n in SHORT_CHAINS if n < most), self._whole]
        self._tree = None if size is None else Arm(most, size)
        self._acceptance = PositionAcceptance(most)
        self._branching = PositionAcceptance(most, self._acceptance if self._is_optional else None)
        self._paces: dict[int, _Pace] = {}
        self._arms = self._chains  # that may draft the round
        self._is_first = True  # the first drafted round of a call, which stores the prompt's context too

    def begin_call(self) -> None:
        """A call of `generate` begins."""
        self._is_first = True
        for pace in self._paces.values():
            pace.pause = pace.pause and replace(pace.pause, num_steps=0)  # the call before keeps its own

    def price(self, num_rows: int) -> float:
        """Tokens a row that the time of one more proposal is worth."""
        pace = self._pace(num_rows)
        return NOMINAL_PROPOSAL * max(self._value(pace, self._whole), 1.0)

    def plan(self, num_rows: int, room: int, offer: Offer | None = None, may_branch: Callable[[], bool] = bool) -> Plan:
        """Choose what the next round proposes.

        Args:
            num_rows (`int`): Rows of the batch.
            room (`int`): Most tokens of a path that there is room for.
            offer ([`Offer`], *optional*): What can be copied from the text.
            may_branch (`Callable`, *optional*): Says whether it may be a tree, once that is wanted.
        """
        if not room:
            return Plan(STEP, 0)
        pace = self._pace(num_rows)
        self._arms = self._drafting(pace, may_branch)
        favourite, pace.rival = STEP if pace.pause else self._best(pace), 0.0
        value = self._value(pace, favourite)
        if self._is_timed and pace.pause is None and self._wants_step(pace, favourite):
            return Plan(STEP, 0, is_comparison=True)
        if offer is not None and offer.expected > value * pace.costs.of(COPY, offer.length):
            return Plan(COPY, offer.length, offer)
        if not self._is_full and (trial := self._trial(pace, favourite)) is not None:
            favourite, pace.rival = trial, value
        return Plan(
            favourite,
            min(favourite.length, room),
            pause=pace.pause if favourite is STEP else None,
            least_chance=0.0 if self._is_full else LEAST_CHANCE,
        )

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Learn from a round and its wall time."""
        arm, pace = outcome.plan.arm, self._pace(len(outcome.rows))
        num_proposals = outcome.num_proposed if arm.is_copied else self._width(arm)
        cost = pace.costs.of(arm, num_proposals)
        pace.time += cost
        pace.rounds_since_step = pace.rounds_since_step + 1 if arm is not STEP else 0
        if outcome.plan.is_comparison:
            pace.gap = min(GAP_GROWTH * pace.gap, MOST_GAP)
        for acceptance in (self._acceptance, self._branching) if self._tree else (self._acceptance,):
            acceptance.forget()
        if arm.is_drafted:
            acceptance = self._acceptance if arm.tree_size is None else self._branching
            for count in outcome.num_brought:
                acceptance.observe(outcome.plan.length, count - 1)
        is_typical = not arm.is_drafted or (outcome.plan.length == arm.length and not self._is_first)
        if self._is_timed and is_typical:
            surprises = pace.costs.observe(arm, num_proposals, seconds)
            if arm is STEP and surprises:  # the machine's pace was taken for an arm's cost, or the other way round
                pace.gap = FIRST_GAP
            pace.is_doubtful = surprises if arm is STEP else pace.is_doubtful
        if arm.is_drafted:
            self._is_first, pace.num_drafted = False, pace.num_drafted + 1
            if pace.rival:
                pace.lost = max(pace.lost + cost - outcome.tokens / pace.rival, 0.0)
            else:
                pace.losing = max(pace.losing + cost - outcome.tokens, 0.0)
        if (arm.is_drafted or outcome.plan.is_comparison) and not self._is_full:
            self._judge(pace)

    def _wants_step(self, pace: _Pace, favourite: Arm) -> bool:
        """Whether to make a single step for the sake of its time: once at first, then often where that is in doubt."""
        ahead, doubt = math.log(self._value(pace, favourite)), pace.costs.doubt(favourite, STEP)
        is_sure = ahead > HOPE * doubt and not pace.is_doubtful and pace.costs.num_readings[STEP]
        return pace.rounds_since_step >= (1 if ahead < 0 else MOST_GAP if is_sure else pace.gap)

    def _judge(self, pace: _Pace) -> None:
        """Pause drafting where it surely brings less than single steps in the same time, or go on with it."""
        best = self._best(pace)
        ahead, doubt = self._ahead(pace, best, STEP)
        if pace.pause is None and (ahead < -SURE_BY * doubt or (ahead < 0 and pace.losing > PATIENCE)):
            pace.lost, pace.losing = pace.lost + pace.losing, 0.0
        elif pace.pause is None or ahead > 0:
            pace.pause = None
            return
        cost, readings = pace.costs.of(best, self._width(best)), pace.costs.num_readings
        num_timed = sum(count for arm, count in readings.items() if arm.is_drafted) if readings[STEP] else 0
        pace.pause = Pause(self._tokens(best), cost, num_timed)

    def _trial(self, pace: _Pace, favourite: Arm) -> Arm | None:
        """The arm that is tried in place of the favourite, if there is one that may well be better."""
        allowed = LOSS * pace.time - pace.lost + (FIRST_LOSS if pace.pause else 0.0)
        if allowed <= 0:
            return None
        lift, found = 0.0 if pace.pause else 1.0, list[Arm]()
        value, most = self._value(pace, favourite, lift), self._value(pace, favourite, HOPE)
        for arm in self._arms:
            cost, doubt = pace.costs.of(arm, self._width(arm)), pace.costs.doubt(arm, favourite)
            hope = self._tokens(arm, HOPE) / (cost * math.exp(-HOPE * doubt))
            if arm is not favourite and hope > most and cost - self._tokens(arm, lift) / value <= allowed:
                found.append(arm)
        return min(found, key=lambda arm: pace.costs.num_readings[arm], default=None)

    def _drafting(self, pace: _Pace, may_branch: Callable[[], bool]) -> list[Arm]:
        """Arms that draft."""
        if self._tree is None or (self._is_optional and pace.num_drafted < CHAINS_FIRST) or not may_branch():
            return self._chains
        return [*self._chains, self._tree] if self._is_optional else [self._tree]

    def _best(self, pace: _Pace) -> Arm:
        """The best drafting arm if proposals are accepted as often as they may well be: whole blocks at first."""
        return max(self._arms, key=lambda arm: self._value(pace, arm, 1.0))

    def _ahead(self, pace: _Pace, arm: Arm, other: Arm) -> tuple[float, float]:
        """Logarithm of how much better an arm is than another one, and the standard error of that."""
        ahead = math.log(self._value(pace, arm) / self._value(pace, other))
        lifts = [math.log(self._tokens(one, 1.0) / self._tokens(one)) for one in (arm, other)]
        return ahead, math.hypot(pace.costs.doubt(arm, other), lifts[0] - lifts[1])

    def _value(self, pace: _Pace, arm: Arm, lift: float = 0.0) -> float:
        """Tokens in the time of a single step."""
        return self._tokens(arm, lift) / pace.costs.of(arm, self._width(arm))

    def _tokens(self, arm: Arm, lift: float = 0.0) -> float:
        return (self._acceptance if arm.tree_size is None else self._branching).tokens(arm.length, lift)

    @staticmethod
    def _width(arm: Arm) -> int:
        """Proposals that are verified."""
        return arm.tree_size or arm.length

    def _pace(self, num_rows: int) -> _Pace:
        if num_rows not in self._paces:
            like = next(reversed(self._paces.values())).costs if self._paces else None
            arms = [*self._chains, *([self._tree] if self._tree else []), COPY]
            self._paces[num_rows] = _Pace(Costs(arms, not self._is_timed, like))
        return self._paces[num_rows]


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


def policy_for(
    drafter: DominoDraftModel, target: nn.Module, most: int, do_sample: bool, is_static: bool = False
) -> Policy:
    """The policy of a call of `generate`, with what the calling thread knows from earlier ones that chose alike.

    Args:
        drafter ([`DominoDraftModel`]): Its `draft_length` says whether whole blocks are all that is drafted.
        target (`nn.Module`): The target.
        most (`int`): Most proposals of a path.
        do_sample (`bool`): Whether the target samples.
        is_static (`bool`, *optional*, defaults to `False`): Whether rounds are of fixed shape, where chains and trees
            would be captured and compiled each.
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

"""The policy of rounds: it chooses the arm of the next one by the tokens and the time of recent rounds.

The arms are a plain decode step, chains of a few lengths, a tree, and prompt lookup where the text has a match. Among
those that draft, the policy plays the one with the most tokens per time. It takes each to be one standard error better
than measured (optimism under uncertainty), so whole blocks come first. Drafting pauses when plain decode steps are
expected to emit more tokens in the same time. As long as that is not certain, a text may still draft, from an
exploration budget of a few plain decode steps: lost time is taken from the budget, and gained time is added to it (a
CUSUM test).

No arm changes the text.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn
from transformers import GenerationConfig

from hf_domino.decoding.estimates import NOMINAL_PROPOSAL, PRIOR_ERROR, Acceptance, Costs
from hf_domino.decoding.prompt_lookup import Offer
from hf_domino.decoding.round import STEP, Arm, Outcome, Plan
from hf_domino.methods import DominoDraftModel
from hf_domino.statistics.stats import Pause

SHORT_CHAINS = (2, 4)
ADAPTIVE_SIZE = 16  # nodes of a tree that paid most where trees were measured
CHAINS_FIRST = 24  # rounds: in a short text trees have nothing to win, and each target must be tried with one
# The exploration budget of a text in plain decode steps, which two rounds that emit nothing would use up, and the share
# of its time that is added: a trial in some 150 tokens, so a drafter that never pays costs less than a hundredth.
BUDGET = 2.0
BUDGET_SHARE = 0.005
# Rounds between plain decode steps that are made to measure their time: where it is uncertain whether drafting pays,
# and elsewhere. They lose little in the first case, and a hundredth of a text of 128 tokens in the second.
GAP = 2
LONG_GAP = 64
DEFAULT_ASSISTANT_TOKENS = 20  # Transformers' own, for small models that draft token by token
ALIKE = 16  # tokens for which the sequences of a batch are taken to be alike, before they show that they are not
LOOKUP = Arm(1, is_lookup=True)


@dataclass
class _Estimates:
    """What is known about batches of one size.

    Args:
        acceptance_of (`Callable`): Gives what is known of the proposals of an arm, in batches of any size.
        costs ([`Costs`]): Of the arms.
    """

    acceptance_of: Callable[[Arm], Acceptance]
    costs: Costs
    pause: Pause | None = None  # the one that drafting is in
    num_drafted: int = 0  # rounds
    rounds_since_step: int = 0
    most_budget: float = BUDGET  # plain decode steps that the text may lose
    budget: float = BUDGET  # what is left of them
    emitted: dict[int, int] = field(default_factory=dict)  # tokens of drafted rounds, by sequence

    @property
    def slowest(self) -> float:
        """Tokens of the slowest sequence in relation to the mean: a batch has as many rounds as that one needs."""
        if len(self.emitted) < 2:
            return 1.0
        mean = sum(self.emitted.values()) / len(self.emitted)
        return (min(self.emitted.values()) + ALIKE) / (mean + ALIKE)

    def count(self, outcome: Outcome) -> None:
        """Add what each sequence emitted; those that have ended are forgotten."""
        emitted = zip(outcome.rows, outcome.num_emitted, strict=True)
        self.emitted = {row: self.emitted.get(row, 0) + count for row, count in emitted}

    def value(self, arm: Arm, lift: float = 0.0) -> float:
        """Tokens in the time of a plain decode step."""
        tokens = self.acceptance_of(arm).tokens(arm.length, lift)
        if arm is not STEP:
            tokens = max(tokens * self.slowest, 1.0)
        return tokens / self.costs.of(arm, arm.width)

    def hoped(self, arm: Arm) -> float:
        """Its value if tokens and time are one standard error better than measured."""
        return self.value(arm, 1.0) * math.exp(self.costs.standard_error(arm))

    def pays(self, arm: Arm) -> bool:
        """Whether an arm is expected to emit more than plain decode steps, or may do so and there is budget for it."""
        if self.budget <= 0:
            return self.value(arm) > 1
        return self.hoped(arm) > 1

    def pause_before(self, best: Arm) -> Pause:
        """The pause of drafting that is due because the best arm does not pay."""
        readings = self.costs.num_readings
        num_timed = 0
        if readings[STEP]:
            num_timed = sum(count for arm, count in readings.items() if arm.is_drafted)
        tokens = self.acceptance_of(best).tokens(best.length)
        return Pause(tokens * self.slowest, self.costs.of(best, best.width), num_timed)

    def wants_step(self, favourite: Arm) -> bool:
        """Whether to make a plain decode step to measure its time: once at first, then often while it is uncertain."""
        ahead = math.log(self.value(favourite))
        error = self.costs.standard_error(favourite)
        num_readings = self.costs.num_readings[STEP]
        # A time that was read once or twice may be the machine's hiccup.
        is_sure = num_readings > 0 and ahead > error + PRIOR_ERROR / num_readings
        return self.rounds_since_step >= (1 if ahead < 0 else LONG_GAP if is_sure else GAP)


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
        self._chains = [self._whole]
        if not is_full:
            self._chains = [*(Arm(n) for n in SHORT_CHAINS if n < most), self._whole]
        self._trees = [] if size is None else [Arm(most, size)]
        self._acceptance = Acceptance(most)
        self._branching = Acceptance(most, self._acceptance.rates if self._is_optional else None)
        self._known: dict[int, _Estimates] = {}
        self._is_first = True  # the first drafted round of a call, which stores the prompt's context too

    def begin_call(self) -> None:
        """A call of `generate` begins."""
        self._is_first = True
        for known in self._known.values():
            # Every text has its own budget. After a text in which drafting did not pay, the next one has half of it.
            known.budget = known.most_budget = known.most_budget / 2 if known.pause else BUDGET
            known.pause = None
            known.emitted = {}

    def price(self, num_rows: int) -> float:
        """Tokens per row that the time of one more proposal is worth."""
        known = self._estimates_of(num_rows)
        return NOMINAL_PROPOSAL * max(known.value(self._whole), 1.0)

    def plan(self, num_rows: int, room: int, offer: Offer | None = None, may_branch: Callable[[], bool] = bool) -> Plan:
        """Choose what the next round proposes.

        Args:
            num_rows (`int`): Rows of the batch.
            room (`int`): Most tokens of a path that there is room for.
            offer ([`Offer`], *optional*): What prompt lookup has found.
            may_branch (`Callable`, *optional*): Called when a tree is wanted: whether the round may be one.
        """
        if not room:
            return Plan(STEP, 0)
        known = self._estimates_of(num_rows)
        best = max(self._drafting(known, may_branch), key=known.hoped)
        if not self._is_full and not known.pays(best):
            known.pause = known.pause or known.pause_before(best)
            favourite = STEP
        else:
            favourite = best
            known.pause = None
            if not self._is_full and known.wants_step(best):
                return Plan(STEP, 0, is_comparison=True)
        if offer is not None and offer.expected > known.value(favourite) * known.costs.of(LOOKUP, offer.length):
            return Plan(LOOKUP, offer.length, offer)
        return Plan(
            favourite,
            min(favourite.length, room),
            pause=known.pause,
            least_chance=0.0 if self._is_full else NOMINAL_PROPOSAL,  # a node that costs more than it emits
        )

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Learn from a round and its wall time."""
        arm = outcome.plan.arm
        known = self._estimates_of(len(outcome.rows))
        num_proposals = arm.width
        if arm.is_lookup:
            num_proposals = outcome.num_proposed
        known.rounds_since_step += 1
        if arm is STEP:
            known.rounds_since_step = 0
        is_trusted = known.value(arm) > 1
        self._acceptance.forget()
        self._branching.forget()
        if arm.is_drafted:
            for count in outcome.num_emitted:
                self._acceptance_of(arm).observe(range(outcome.plan.length), count - 1)
        is_typical = not arm.is_drafted or (outcome.plan.length == arm.length and not self._is_first)
        if not self._is_full and is_typical:
            known.costs.observe(arm, num_proposals, seconds)
        cost = known.costs.of(arm, num_proposals)
        known.budget += BUDGET_SHARE * cost
        if arm.is_drafted:
            self._is_first = False
            known.count(outcome)
            known.num_drafted += 1
            budget = known.budget + outcome.tokens * known.slowest - cost
            # A round that was expected to pay takes nothing from the budget, which is for trials.
            if is_trusted:
                budget = max(budget, min(known.budget, 0.0))
            known.budget = min(budget, known.most_budget)

    def _drafting(self, known: _Estimates, may_branch: Callable[[], bool]) -> list[Arm]:
        """Arms that draft."""
        if not self._trees or (self._is_optional and known.num_drafted < CHAINS_FIRST) or not may_branch():
            return self._chains
        if self._is_optional:
            return self._chains + self._trees
        return self._trees

    def _acceptance_of(self, arm: Arm) -> Acceptance:
        """What is known of the proposals of an arm."""
        if arm.tree_size is None:
            return self._acceptance
        return self._branching

    def _estimates_of(self, num_rows: int) -> _Estimates:
        if num_rows not in self._known:
            like = None
            if self._known:
                like = next(reversed(self._known.values())).costs
            self._known[num_rows] = _Estimates(self._acceptance_of, Costs([*self._chains, *self._trees, LOOKUP], like))
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
    size = config.draft_tree_size
    if is_static or is_full:
        size = config.fixed_tree_size
    if is_full:
        return Policy(most, size, is_full=True)
    if not hasattr(_learnt, "by_drafter"):
        _learnt.by_drafter = weakref.WeakKeyDictionary()
    policies = _learnt.by_drafter.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
    # Rounds of fixed shape have other costs.
    policy = policies.setdefault((most, do_sample, size, is_static), Policy(most, size))
    policy.begin_call()
    return policy

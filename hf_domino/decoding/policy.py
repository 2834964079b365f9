"""The policy: it chooses the arm of the next round from the tokens and the time of recent rounds.

The arms are a plain decode step, chains of a few lengths, a tree, and, if the text has a match, prompt lookup. Among
the arms that draft, the policy plays the one with the most tokens per time. It assumes that each arm is one standard
error better than measured (optimism under uncertainty), so it tries full blocks first. Drafting pauses when plain
decode steps are expected to emit more tokens in the same time. As long as that is not certain, a text may still draft,
within an exploration budget of a few plain decode steps: lost time is taken from the budget, and gained time is added
to it (a CUSUM test).

The choice of an arm never changes the generated text.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torch import nn
from transformers import GenerationConfig

from hf_domino._common.forks import Lock
from hf_domino.decoding.estimates import NOMINAL_PROPOSAL, PRIOR_ERROR, Acceptance, Costs
from hf_domino.decoding.prompt_lookup import Offer
from hf_domino.decoding.round import STEP, Arm, Outcome, Plan
from hf_domino.methods import DominoDraftModel
from hf_domino.stats.decoding_stats import Pause

SHORT_CHAINS = (2, 4)
ADAPTIVE_SIZE = 16  # the number of nodes that was fastest when trees were measured
# With adaptive trees, this many drafted rounds come before the first tree. A short text gains nothing from trees, and
# each target must first be tested with one.
CHAINS_FIRST = 24
# The exploration budget of a text, in plain decode steps; two rounds that emit nothing would use it up. The share is
# the part of each round's time that is added to the budget. It allows one trial in about 150 tokens, so a drafter that
# never pays costs less than one percent.
BUDGET = 2.0
BUDGET_SHARE = 0.005
# How many rounds to make between two plain decode steps that only measure their own time. The short gap applies while
# it is uncertain whether drafting pays, because a plain decode step then loses little. The long gap applies otherwise,
# and loses one percent of a text of 128 tokens.
SHORT_STEP_GAP = 2
LONG_STEP_GAP = 64
DEFAULT_ASSISTANT_TOKENS = 20  # the default of Transformers, meant for small models that draft token by token
PSEUDO_TOKENS = 16  # tokens added to each sequence of a batch, so that all count as alike until they show a difference
LOOKUP = Arm(1, is_lookup=True)


@dataclass
class _Estimates:
    """Estimates for batches of one size.

    Args:
        acceptance_of (`Callable`): Returns the acceptance estimates of an arm, which batches of all sizes share.
        costs ([`Costs`]): The costs of the arms.
    """

    acceptance_of: Callable[[Arm], Acceptance]
    costs: Costs
    pause: Pause | None = None  # the current pause of drafting
    num_drafted: int = 0  # drafted rounds so far
    rounds_since_step: int = 0  # rounds since the last plain decode step
    most_budget: float = BUDGET  # the largest exploration budget of the current text, in plain decode steps
    budget: float = BUDGET  # what is left of it
    emitted: dict[int, int] = field(default_factory=dict)  # tokens that drafted rounds emitted, by sequence

    @property
    def slowest(self) -> float:
        """The ratio of the slowest sequence's tokens to the mean; that sequence decides how many rounds a batch has."""
        if len(self.emitted) < 2:
            return 1.0
        mean = sum(self.emitted.values()) / len(self.emitted)
        return (min(self.emitted.values()) + PSEUDO_TOKENS) / (mean + PSEUDO_TOKENS)

    def count(self, outcome: Outcome) -> None:
        """Add the tokens that each sequence emitted, and drop sequences that have ended."""
        emitted = zip(outcome.rows, outcome.num_emitted, strict=True)
        self.emitted = {row: self.emitted.get(row, 0) + count for row, count in emitted}

    def value(self, arm: Arm, lift: float = 0.0) -> float:
        """How many tokens an arm is expected to emit in the time of a plain decode step."""
        tokens = self.acceptance_of(arm).tokens(arm.length, lift)
        if arm is not STEP:
            tokens = max(tokens * self.slowest, 1.0)
        return tokens / self.costs.of(arm, arm.width)

    def optimistic_value(self, arm: Arm) -> float:
        """The value of an arm if its tokens and its time are both one standard error better than measured."""
        return self.value(arm, 1.0) * math.exp(self.costs.standard_error(arm))

    def pays(self, arm: Arm) -> bool:
        """Whether an arm is expected to beat plain decode steps or, as long as there is budget, might beat them."""
        if self.budget <= 0:
            return self.value(arm) > 1
        return self.optimistic_value(arm) > 1

    def pause_before(self, best: Arm) -> Pause:
        """Create the record of a pause that begins because not even the best arm pays."""
        readings = self.costs.num_readings
        num_timed = 0
        if readings[STEP]:
            num_timed = sum(count for arm, count in readings.items() if arm.is_drafted)
        tokens = self.acceptance_of(best).tokens(best.length)
        return Pause(tokens * self.slowest, self.costs.of(best, best.width), num_timed)

    def wants_step(self, favourite: Arm) -> bool:
        """Whether to make a plain decode step now to measure its time, which is frequent until drafting surely pays."""
        ahead = math.log(self.value(favourite))
        error = self.costs.standard_error(favourite)
        num_readings = self.costs.num_readings[STEP]
        # One or two readings can be outliers, so with few readings the lead must be larger.
        is_sure = num_readings > 0 and ahead > error + PRIOR_ERROR / num_readings
        return self.rounds_since_step >= (1 if ahead < 0 else LONG_STEP_GAP if is_sure else SHORT_STEP_GAP)


class Policy:
    """Chooses the arm of every round.

    Args:
        most (`int`): Number of proposals in a chain of full length.
        tree_size (`int` or `str`, *optional*): Maximum number of nodes of a tree; every drafted round then proposes a
            tree. With `"adaptive"`, the policy chooses between chains and trees. It only uses chains with None, or if
            the target cannot verify trees.
        smaller_trees (`Sequence[int]`, *optional*): Smaller sizes of trees that the policy can also choose, ascending.
        is_full (`bool`, *optional*, defaults to `False`): Whether to always draft full blocks, or trees of full depth.
    """

    def __init__(
        self,
        most: int,
        tree_size: int | str | None = None,
        smaller_trees: Sequence[int] = (),
        is_full: bool = False,
    ):
        self._is_full = is_full
        self._is_optional = isinstance(tree_size, str)
        size = ADAPTIVE_SIZE if isinstance(tree_size, str) else tree_size
        self._full_chain = Arm(most)
        self._chains = [self._full_chain]
        if not is_full:
            self._chains = [*(Arm(n) for n in SHORT_CHAINS if n < most), self._full_chain]
        self._trees = list[Arm]()
        if size is not None:
            self._trees = [*(Arm(most, n) for n in smaller_trees if n < size), Arm(most, size)]
        self._acceptance = Acceptance(most)  # of chains
        self._branching = dict[Arm, Acceptance]()
        # A tree is first assumed to be accepted like the next smaller one, and the smallest like a chain.
        guesses = self._acceptance.rates if self._is_optional else None
        for tree in self._trees:
            self._branching[tree] = Acceptance(most, guesses)
            guesses = self._branching[tree].rates
        self._by_batch_size: dict[int, _Estimates] = {}
        self._is_first = True  # until the first drafted round of a call, which takes longer: it stores the prompt too

    def begin_call(self) -> None:
        """Prepare for a new call of `generate`."""
        self._is_first = True
        for estimates in self._by_batch_size.values():
            # Every text has its own budget. If the last text ended in a pause, this one gets half of the last budget.
            estimates.budget = estimates.most_budget = estimates.most_budget / 2 if estimates.pause else BUDGET
            estimates.pause = None
            estimates.emitted = {}

    def price(self, num_rows: int) -> float:
        """How many tokens per sequence one more proposal must be expected to add, to be worth its time."""
        estimates = self._estimates_of(num_rows)
        return NOMINAL_PROPOSAL * max(estimates.value(self._full_chain), 1.0)

    def plan(self, num_rows: int, room: int, offer: Offer | None = None, may_branch: Callable[[], bool] = bool) -> Plan:
        """Choose what the next round proposes.

        Args:
            num_rows (`int`): Number of sequences.
            room (`int`): How many tokens of a path there is room for.
            offer ([`Offer`], *optional*): The proposals of prompt lookup, if it found a match.
            may_branch (`Callable`, *optional*): Returns whether the target can verify trees. It is called only when the
                policy wants one. Defaults to a function that returns `False`.
        """
        if not room:
            return Plan(STEP, 0)
        estimates = self._estimates_of(num_rows)
        arms = self._drafting(estimates, may_branch)
        favourite = arms[0]
        if len(arms) > 1:
            favourite = max(arms, key=estimates.optimistic_value)
        if not self._is_full:
            if not estimates.pays(favourite):
                estimates.pause = estimates.pause or estimates.pause_before(favourite)
                favourite = STEP
            else:
                estimates.pause = None
                if estimates.wants_step(favourite):
                    return Plan(STEP, 0, is_comparison=True)
        if offer is not None and offer.expected > estimates.value(favourite) * estimates.costs.of(LOOKUP, offer.length):
            return Plan(LOOKUP, offer.length, offer)
        return Plan(
            favourite,
            min(favourite.length, room),
            pause=estimates.pause,
            least_chance=0.0 if self._is_full else NOMINAL_PROPOSAL,  # omit tree nodes that cost more than they emit
        )

    def observe(self, outcome: Outcome, seconds: float) -> None:
        """Learn from a round and its wall time."""
        arm = outcome.plan.arm
        estimates = self._estimates_of(len(outcome.rows))
        num_proposals = arm.width
        if arm.is_lookup:
            num_proposals = outcome.num_proposed
        estimates.rounds_since_step += 1
        if arm is STEP:
            estimates.rounds_since_step = 0
        is_trusted = not self._is_full and estimates.value(arm) > 1
        for acceptance in (self._acceptance, *self._branching.values()):
            acceptance.forget()
        if arm.is_drafted:
            for count in outcome.num_emitted:
                self._acceptance_of(arm).observe(range(outcome.plan.length), count - 1)
            estimates.count(outcome)
            estimates.num_drafted += 1
        if self._is_full:  # it never pauses, so neither times nor a budget matter
            return
        is_typical = not arm.is_drafted or (outcome.plan.length == arm.length and not self._is_first)
        if is_typical and outcome.plan.is_timed:
            estimates.costs.observe(arm, num_proposals, seconds)
        cost = estimates.costs.of(arm, num_proposals)
        estimates.budget += BUDGET_SHARE * cost
        if arm.is_drafted:
            self._is_first = False
            budget = estimates.budget + outcome.tokens * estimates.slowest - cost
            # A round that was expected to pay takes nothing from the budget, which is for trials.
            if is_trusted:
                budget = max(budget, min(estimates.budget, 0.0))
            estimates.budget = min(budget, estimates.most_budget)

    def _drafting(self, estimates: _Estimates, may_branch: Callable[[], bool]) -> list[Arm]:
        """The drafting arms that the next round can choose from."""
        if not self._trees or (self._is_optional and estimates.num_drafted < CHAINS_FIRST) or not may_branch():
            return self._chains
        if self._is_optional:
            return self._chains + self._trees
        return self._trees

    def _acceptance_of(self, arm: Arm) -> Acceptance:
        """The acceptance estimates of an arm; chains share theirs, and each size of trees has its own."""
        return self._branching.get(arm, self._acceptance)

    def _estimates_of(self, num_rows: int) -> _Estimates:
        if num_rows not in self._by_batch_size:
            like = None
            if self._by_batch_size:
                like = next(reversed(self._by_batch_size.values())).costs
            self._by_batch_size[num_rows] = _Estimates(
                self._acceptance_of, Costs([*self._chains, *self._trees, LOOKUP], like)
            )
        return self._by_batch_size[num_rows]


# For each drafter and target, the policies that no call uses at the moment, by the settings that they are for.
_Idle = dict[Hashable, list[Policy]]
_idle: weakref.WeakKeyDictionary[DominoDraftModel, weakref.WeakKeyDictionary[nn.Module, _Idle]]
_idle = weakref.WeakKeyDictionary()
_lock = Lock()


def most_proposals(drafter: DominoDraftModel, target: nn.Module, config: GenerationConfig) -> int:
    """Most proposals that a round drafts along one path: the drafter's number, or `num_assistant_tokens` if smaller.

    If `num_assistant_tokens` is not set, `generate` fills in a default of 20. An argument of 20 looks the same, so a
    value of 20 is ignored unless the target's own generation configuration sets `num_assistant_tokens`.

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
    call: object, drafter: DominoDraftModel, target: nn.Module, most: int, do_sample: bool, is_fixed: bool = False
) -> Policy:
    """The policy for a call of `generate`, with what earlier calls with the same settings have learnt.

    Calls that run at the same time never share a policy, because each of them changes its own.

    Args:
        call (`object`): Uses the policy. Once it is no longer referenced, a later call of any thread can take the
            policy.
        drafter ([`DominoDraftModel`]): The drafter. With `draft_length="full"`, its policy only drafts full blocks.
        target (`nn.Module`): The target.
        most (`int`): Maximum number of proposals on a path.
        do_sample (`bool`): Whether the target samples.
        is_fixed (`bool`, *optional*, defaults to `False`): Whether rounds have a fixed shape. Adaptive trees are then
            turned off, because every length and tree would be captured and compiled separately.
    """
    config = drafter.config
    config.check()  # fields can have been changed since the configuration was created
    is_full = config.draft_length == "full"
    size = config.draft_tree_size
    if is_fixed or is_full:
        size = config.fixed_tree_size
    if is_full:
        return Policy(most, size, is_full=True)
    # On other devices, the time of a round hardly depends on the size of its tree unless it has many sequences.
    smaller = config.smaller_trees
    if drafter.device.type != "cpu":
        smaller = smaller[-1:] if is_fixed else ()
    with _lock:
        of_pair = _idle.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
        # Rounds of fixed shape have different costs, so they have a policy of their own.
        idle = of_pair.setdefault((most, do_sample, size, is_fixed), [])
        policy = idle.pop() if idle else Policy(most, size, smaller)
    # Not at the end of the loop, because in Transformers' own loop nothing tells a candidate generator that it is over.
    weakref.finalize(call, idle.append, policy).atexit = False
    policy.begin_call()
    return policy

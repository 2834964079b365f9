"""Decide whether a drafter fits, and find the likely cause if it does not.

Only differences outside the sampling error count. Smaller differences are doubts, which more prompts can settle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any, NamedTuple

from hf_domino._common.verdict import MIN_FORWARDS, gains, slower_in, why_busy
from hf_domino._common.verdict import verdict as speed_verdict
from hf_domino.evaluation.check.estimate import MIN_ROUNDS, Estimate, estimate_difference
from hf_domino.evaluation.check.measure import (
    AS_CONFIGURED,
    LAYERS,
    SHIFT_LABEL,
    WITHOUT_CONTEXT,
    WITHOUT_HEAD,
    Measurement,
)
from hf_domino.evaluation.check.positions import PositionFit

# If a drafter fits, more than half of its first proposals are accepted, even if it is small and was trained briefly on
# text unlike the prompt. A drafter that reads the wrong features is about as good as a bigram, with less than a fifth.
MIN_FIRST_RATE = 0.3
# A variant explains a problem if it makes rounds longer by this share. Equally good settings differ by less than 0.03.
MIN_GAIN = 0.1

FITS = "fits"
DOES_NOT_FIT = "does not fit"
TOO_FEW = "too few to say"

WRONG_LAYERS = "wrong layers"
WRONG_SHIFT_LABEL = "wrong shift_label"
HARMFUL_HEAD = "correction head harms"
WRONG_TARGET = "wrong target"
WRONG_MODE = "wrong chat mode"
UNTRAINED = "untrained"
REMEDIES = {
    WRONG_LAYERS: "Set config.target_layer_ids to the layers it was trained with.",
    WRONG_SHIFT_LABEL: "It seems to be read one position off: give that shift_label to from_pretrained, or write it "
    "into its config.json, in place of sample_from_anchor or query_zero_predicts_next.",
    HARMFUL_HEAD: "Check that its tensors belong to this backbone, or train with a slower curriculum.",
    WRONG_TARGET: "Load the target it was trained for, at the same revision.",
    WRONG_MODE: "Generate in the mode it was trained in, or train it in the other one too.",
    UNTRAINED: "Train it, or go on training.",
}
_CAUSE_OF = {LAYERS: WRONG_LAYERS, SHIFT_LABEL: WRONG_SHIFT_LABEL, WITHOUT_HEAD: HARMFUL_HEAD}


class Cause(NamedTuple):
    """A likely cause: its name, a key of `REMEDIES`, and the measurements that suggest it."""

    name: str
    evidence: str

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.name]


@dataclass(frozen=True)
class CheckResult:
    """The result of a self-test. Printing it shows the verdict, the causes and a table of the measurements.

    Args:
        modes (`list[Measurement]`): Real rounds in each mode of prompts: text, chat, chat with or without thinking.
        variants (`list[Measurement]`): Rounds at every position of the same texts, as configured first.
        causes (`list[Cause]`): Likely causes, the likeliest first; empty if the drafter fits.
        doubts (`list[str]`): Measurements that speak against the drafter, but could be due to chance.
        speed_ups (`list[float]`): Speed-up over plain generation for each prompt that was timed; empty if the drafter
            does not fit.
        contexts (`list[Measurement]`): Real rounds grouped by the number of tokens before them; empty for one group.
        positions (`list[PositionFit]`): How close the drafter is to its target at each position of a block.
        load (`float`, *optional*): Number of threads per core that wanted to run during the measurement.
    """

    modes: list[Measurement]
    variants: list[Measurement]
    causes: list[Cause]
    doubts: list[str]
    speed_ups: list[float] = field(default_factory=list)
    contexts: list[Measurement] = field(default_factory=list)
    positions: list[PositionFit] = field(default_factory=list)
    load: float | None = None

    @property
    def verdict(self) -> str:
        """`"fits"`, `"does not fit"` or `"too few to say"`."""
        if self.causes:
            return DOES_NOT_FIT
        return TOO_FEW if self.doubts else FITS

    @property
    def fits(self) -> bool:
        """Whether acceptance is certainly high enough in every mode, and no variant seems to be clearly better."""
        return self.verdict == FITS

    @property
    def speed_up(self) -> float | None:
        """Geometric mean of the speed-ups over plain generation; None if nothing was timed."""
        if self.speed_ups:
            return geometric_mean(self.speed_ups)
        return None

    @property
    def measured(self) -> Measurement:
        """The real rounds of all modes together."""
        return Measurement("real rounds", [rounds for mode in self.modes for rounds in mode.texts])

    @property
    def acceptance_length(self) -> Estimate:
        """Mean number of tokens per real round, including the bonus token."""
        return self.measured.acceptance_length

    @property
    def first_rate(self) -> Estimate:
        """Share of real rounds whose first proposal was accepted."""
        return self.measured.first_rate

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON: verdict, causes, doubts, and measurements with their 95 % errors."""
        return {
            "verdict": self.verdict,
            "causes": [cause._asdict() | {"remedy": cause.remedy} for cause in self.causes],
            "doubts": self.doubts,
            "speed_up": self.speed_up,
            "speed_ups": self.speed_ups,
            "load": self.load,
            "contexts": [context.to_dict() for context in self.contexts],
            "positions": [position._asdict() for position in self.positions],
            "modes": [mode.to_dict() for mode in self.modes],
            "variants": [variant.to_dict() for variant in self.variants],
        }

    def __str__(self) -> str:
        busy = why_busy(self.load)
        num_rounds = self.measured.num_rounds
        if self.causes:
            lines = ["The drafter does not fit:"]
            lines += [f"- {cause.name}: {cause.evidence} {cause.remedy}" for cause in self.causes]
        elif self.doubts:
            found = f"{num_rounds} rounds of {len(self.measured.texts)} texts"
            lines = [f"Inconclusive: {found} are too few to say whether the drafter fits; give more or longer prompts."]
        else:
            fits = "fits"
            is_certain = num_rounds >= MIN_FORWARDS and not busy
            if is_certain and self.speed_up is not None and not gains(self.speed_up):
                fits = "fits, but does not make its target faster here"
            lines = [f"The drafter {fits}: first proposals accepted: {self.first_rate}, needed {MIN_FIRST_RATE}"]
        lines += ["", *_table(self.modes, self.contexts, self.variants)]
        if self.positions:
            lines += ["", "position  same top-1 token  KL(target || drafter)  total variation"]
            lines += [f"{at:>8}{top_1:>18.2f}{kl:>23.2f}{apart:>17.2f}" for at, top_1, kl, apart in self.positions]
        if self.speed_up is not None:
            counted = slower_in(self.speed_ups)
            said = speed_verdict(self.speed_up, "this drafter", counted, note=busy, num_forwards=num_rounds)
            lines += ["", said]
        return "\n".join(lines)


def _table(
    modes: Sequence[Measurement], contexts: Sequence[Measurement], variants: Sequence[Measurement]
) -> Iterator[str]:
    width = 4 + max(len(measured.name) for measured in (*modes, *contexts, *variants))
    yield f"{'':<{width}}  rounds  acceptance length  first accepted"
    titles = "real rounds", "real rounds, by the tokens before them", "a round at every position"
    for title, rows in zip(titles, (modes, contexts, variants), strict=True):
        if rows:
            yield title
        for row in rows:
            yield f"  {row.name:<{width}}{row.num_rounds:>6}{row.acceptance_length!s:>19}{row.first_rate!s:>16}"
    yield f"± is the sampling error. A variant must be better by more than that, and by {MIN_GAIN:.0%}, to matter."


def decide(
    modes: Sequence[Measurement],
    variants: Sequence[Measurement],
    is_fresh: bool = False,
    is_its_target: bool = False,
) -> CheckResult:
    """Decide whether a drafter fits, and order the likely causes if it does not."""
    # `modes` holds real rounds. `variants` holds rounds at the same positions for every variant, the first of which is
    # as configured. A drafter with initial weights (`is_fresh`) does not fit even if its proposals are accepted,
    # because a target can repeat itself, which is easy to draft.
    rates = {mode.name: mode.first_rate for mode in modes}
    low = [name for name, rate in rates.items() if rate.high < MIN_FIRST_RATE]
    unclear = [name for name, rate in rates.items() if name not in low and not rate.low >= MIN_FIRST_RATE]
    doubts = [f"first proposals accepted: {rates[name]} in {name!r}, needed {MIN_FIRST_RATE}." for name in unclear]
    causes = []
    if is_fresh:
        causes.append(Cause(UNTRAINED, "all norm weights are 1, as in a fresh model."))
    if variants:
        better = _better_variants(variants[0], variants[1:])
        causes += [cause for cause, is_certain in better if is_certain]
        doubts += [cause.evidence for cause, is_certain in better if not is_certain]
    if 0 < len(low) < len(rates) and not unclear:
        by_mode = ", ".join(f"{rate} in {name!r}" for name, rate in rates.items())
        causes.append(Cause(WRONG_MODE, f"first proposals accepted: {by_mode}."))
    elif len(low) == len(rates) and not any(variant.first_rate.low >= MIN_FIRST_RATE for variant in variants):
        known = {cause.name for cause in causes}
        causes += [cause for cause in _from_low_acceptance(variants, is_its_target) if cause.name not in known]
    return CheckResult(list(modes), list(variants), causes, doubts)


def _better_variants(before: Measurement, variants: Sequence[Measurement]) -> list[tuple[Cause, bool]]:
    """Return a cause for each clearly better variant, the best first, and whether the gain is outside the error."""
    gains = {variant.name: estimate_difference(variant.texts, before.texts) for variant in variants}
    found: dict[str, tuple[Cause, bool]] = {}
    for variant in sorted(variants, key=lambda variant: -gains[variant.name]):
        name = next((cause for prefix, cause in _CAUSE_OF.items() if variant.name.startswith(prefix)), WRONG_TARGET)
        gain = gains[variant.name]
        old = before.acceptance_length
        new = variant.acceptance_length
        if variant.num_rounds >= MIN_ROUNDS and gain >= MIN_GAIN * old and name not in found:
            evidence = f"{variant.name} acceptance length is {new:.2f}, not {old:.2f}: a gain of {gain}."
            found[name] = Cause(name, evidence), gain.low > 0
    return list(found.values())


def _from_low_acceptance(variants: Sequence[Measurement], is_its_target: bool) -> Iterator[Cause]:
    """Yield the causes that remain, judged by whether the context helps and whether the target is the recorded one."""
    named = {variant.name: variant for variant in variants if variant.num_rounds >= MIN_ROUNDS}
    if not {AS_CONFIGURED, WITHOUT_CONTEXT} <= set(named):
        yield Cause(UNTRAINED, "acceptance is low, and the texts are shorter than a block: no variant was measured.")
        return
    configured = named[AS_CONFIGURED]
    without = named[WITHOUT_CONTEXT]
    gain = estimate_difference(configured.texts, without.texts)
    figures = (
        f"acceptance length is {configured.acceptance_length:.2f} with context and "
        f"{without.acceptance_length:.2f} without: a gain of {gain}."
    )
    if gain.high < MIN_GAIN * without.acceptance_length and not is_its_target:
        yield Cause(WRONG_TARGET, f"the context features do not help: {figures}")
        yield Cause(WRONG_LAYERS, "those that were tried instead do not do better, but not all were.")
    yield Cause(UNTRAINED, f"acceptance is low: {figures}")

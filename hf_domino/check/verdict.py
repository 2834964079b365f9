"""What the measurements of a self-test mean: does the drafter fit, and if not, what is the likely cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_domino.check.measure import AS_CONFIGURED, LAYERS, SHIFT_LABEL, WITHOUT_CONTEXT, WITHOUT_HEAD, Measurement

# A drafter that fits gets more than half of its first proposals accepted, also a small one that was trained briefly on
# text unlike the prompt; one that reads the wrong features gets about as many as a bigram would, below a fifth.
MIN_FIRST_RATE = 0.3
# A variant explains something if rounds get longer by this share; between equally good settings it is below 0.03.
MIN_GAIN = 0.1
MIN_ROUNDS = 8  # fewer say nothing either way

WRONG_LAYERS, WRONG_SHIFT_LABEL, HARMFUL_HEAD = "wrong layers", "wrong shift_label", "correction head harms"
WRONG_TARGET, WRONG_MODE, UNTRAINED = "wrong target", "wrong chat mode", "untrained"
REMEDIES = {
    WRONG_LAYERS: "Set config.target_layer_ids to the layers it was trained with.",
    WRONG_SHIFT_LABEL: "Set config.shift_label to the value it was trained with.",
    HARMFUL_HEAD: "Check that prefix_gru and embed_proj belong to this backbone, or train with a slower curriculum.",
    WRONG_TARGET: "Load the target it was trained for, at the same revision.",
    WRONG_MODE: "Generate in the mode it was trained in, or train it in the other one too.",
    UNTRAINED: "Train it, or go on training.",
}
_CAUSE_OF = {LAYERS: WRONG_LAYERS, SHIFT_LABEL: WRONG_SHIFT_LABEL, WITHOUT_HEAD: HARMFUL_HEAD}


@dataclass(frozen=True)
class Cause:
    """One likely cause.

    Args:
        name (`str`): One of `"wrong layers"`, `"wrong shift_label"`, `"correction head harms"`, `"wrong target"`,
            `"wrong chat mode"`, `"untrained"`.
        evidence (`str`): What was measured.
    """

    name: str
    evidence: str

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.name]


@dataclass(frozen=True)
class CheckResult:
    """What a self-test found. Printing it shows the verdict, the causes and the table of measurements.

    Args:
        modes (`list[Measurement]`): Real rounds, per mode of prompt: text, chat, chat with and without thinking.
        variants (`list[Measurement]`): A round at every position of the same text, as configured first.
        causes (`list[Cause]`): Likely causes, the likeliest first; empty where the drafter fits.
    """

    modes: list[Measurement]
    variants: list[Measurement]
    causes: list[Cause]

    @property
    def fits(self) -> bool:
        """Whether acceptance is high enough in every mode, and no variant does clearly better."""
        return not self.causes

    @property
    def measured(self) -> Measurement:
        """The real rounds of all modes together."""
        return Measurement("real rounds", [length for mode in self.modes for length in mode.acceptance_lengths])

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per real round, bonus included."""
        return self.measured.acceptance_length

    @property
    def first_rate(self) -> float:
        """Share of real rounds whose first proposal was accepted."""
        return self.measured.first_rate

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        lines = [f"The drafter {verdict}: first proposals accepted: {self.first_rate:.2f}, needed {MIN_FIRST_RATE}"]
        lines += [f"- {cause.name}: {cause.evidence} {cause.remedy}" for cause in self.causes]
        return "\n".join([*lines, "", *_table(self.modes, self.variants)])


def _table(modes: Sequence[Measurement], variants: Sequence[Measurement]) -> Iterator[str]:
    width = 4 + max(len(measured.name) for measured in (*modes, *variants))
    yield f"{'':<{width}}  rounds  acceptance length  first accepted"
    for title, rows in (("real rounds", modes), ("a round at every position", variants)):
        yield title
        for row in rows:
            yield f"  {row.name:<{width}}{row.num_rounds:>6}{row.acceptance_length:>19.2f}{row.first_rate:>16.2f}"
    yield f"A variant must do {MIN_GAIN:.0%} better than the drafter as configured to mean anything."


def judge(modes: Sequence[Measurement], variants: Sequence[Measurement], is_fresh: bool = False) -> CheckResult:
    """Decide whether a drafter fits and order the likely causes if it does not.

    Args:
        modes (`Sequence[Measurement]`): Real rounds, per mode.
        variants (`Sequence[Measurement]`): As configured first, then the variants.
        is_fresh (`bool`, *optional*, defaults to `False`): Whether the weights look as initialised. Such a drafter does
            not fit even where it is accepted: it may copy a target that repeats itself.

    Raises:
        ValueError: If there are too few rounds to judge.
    """
    num_rounds = sum(mode.num_rounds for mode in modes)
    if num_rounds < MIN_ROUNDS:
        raise ValueError(
            f"prompts must give at least {MIN_ROUNDS} rounds to judge, got {num_rounds}: "
            "the target's answers are too short. Give more prompts, or ones with longer answers."
        )
    usable = [variant for variant in variants if variant.num_rounds >= MIN_ROUNDS]
    low = [mode for mode in modes if mode.num_rounds and mode.first_rate < MIN_FIRST_RATE]
    causes = [Cause(UNTRAINED, "all norm weights are 1, as in a fresh model.")] if is_fresh else []
    causes += _from_variants(usable)
    if low and len(low) < len([mode for mode in modes if mode.num_rounds]):
        rates = ", ".join(f"{mode.first_rate:.2f} in {mode.name!r}" for mode in modes if mode.num_rounds)
        causes.append(Cause(WRONG_MODE, f"the first proposal is accepted at a rate of {rates}."))
    elif low:
        known = {cause.name for cause in causes}
        causes += [cause for cause in _from_low_acceptance(usable) if cause.name not in known]
    return CheckResult(list(modes), list(variants), causes)


def _from_variants(variants: Sequence[Measurement]) -> Iterator[Cause]:
    """A cause for each kind of variant that does clearly better, the best first."""
    if not variants or variants[0].name != AS_CONFIGURED:
        return
    before, seen = variants[0].acceptance_length, set()
    for variant in sorted(variants[1:], key=lambda variant: -variant.acceptance_length):
        kind = next((cause for prefix, cause in _CAUSE_OF.items() if variant.name.startswith(prefix)), WRONG_TARGET)
        if variant.acceptance_length < (1 + MIN_GAIN) * before or kind in seen:
            continue
        seen.add(kind)
        yield Cause(kind, f"{variant.name} acceptance length is {variant.acceptance_length:.2f}, not {before:.2f}.")


def _from_low_acceptance(variants: Sequence[Measurement]) -> Iterator[Cause]:
    """Causes that no variant puts right, by whether the context is of any use."""
    named = {variant.name: variant for variant in variants}
    if AS_CONFIGURED not in named:
        yield Cause(UNTRAINED, "acceptance is low, and the texts are shorter than a block: no variant was measured.")
        return
    with_context, without = named[AS_CONFIGURED].acceptance_length, named[WITHOUT_CONTEXT].acceptance_length
    figures = f"acceptance length is {with_context:.2f} with context and {without:.2f} without."
    if with_context < (1 + MIN_GAIN) * without:
        yield Cause(WRONG_TARGET, f"the context features do not help: {figures}")
        yield Cause(WRONG_LAYERS, "those that were tried instead do not do better, but not all were.")
    yield Cause(UNTRAINED, f"acceptance is low: {figures}")

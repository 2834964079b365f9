"""The self-test: does a drafter fit its target, although all shapes match, and if not, why not.

`prompts` prepares what is asked, `measure` runs real rounds and variants of them, `verdict` says what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_domino.check.measure import Measurement, measure_variants, write_text
from hf_domino.check.prompts import prepare_prompts
from hf_domino.check.verdict import Cause, CheckResult, judge
from hf_domino.compatibility import check_drafter, check_target
from hf_domino.identity import recognise
from hf_domino.modeling import DominoDraftModel

__all__ = ["Cause", "CheckResult", "Measurement", "check_fit"]

MAX_NEW_TOKENS = 64  # per prompt; with the default prompts enough rounds for a rate


def check_fit(
    drafter: DominoDraftModel,
    target: PreTrainedModel,
    tokenizer: Any = None,
    prompts: Sequence[Any] | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> CheckResult:
    """Measure whether a drafter fits its target; [`DominoDraftModel.check`] is the same.

    Args:
        drafter (`DominoDraftModel`): The drafter; not changed.
        target (`PreTrainedModel`): The target; not changed.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Defaults to the one saved with the target.
        prompts (`Sequence`, *optional*): Texts, lists of messages, or token ids; defaults to a few short ones.
        max_new_tokens (`int`, *optional*, defaults to 64): Tokens to generate per prompt.

    Returns:
        [`CheckResult`]: The verdict, printable.

    Raises:
        ValueError: If sizes, layers or model type differ, or if there is nothing to measure.
    """
    check_drafter(drafter)
    check_target(drafter.config, target)
    recognise(drafter.config, target, tokenizer)
    prepared = prepare_prompts(target, tokenizer, prompts)
    texts = [write_text(drafter, target, prompt, max_new_tokens) for prompt in prepared]
    modes: dict[str, list[int]] = {}
    for text in texts:
        modes.setdefault(text.mode, []).extend(text.acceptance_lengths)
    variants = measure_variants(drafter, target, texts)
    return judge([Measurement(*mode) for mode in modes.items()], variants, _is_fresh(drafter))


def _is_fresh(drafter: DominoDraftModel) -> bool:
    """Whether the norms are still as initialised, which training changes within a few steps."""
    norms = [weight for name, weight in drafter.named_parameters() if "norm" in name]
    return all(bool((weight == 1).all()) for weight in norms)

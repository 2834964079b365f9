"""Test whether a drafter really fits its target, beyond matching shapes, and find out why if it does not.

First, `width` checks that the target supports speculative decoding at all. Then `prompts` prepares the prompts,
`measure` runs real rounds, variants of the drafter and timings, and `verdict` interprets them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_domino._common.errors import invalid_argument
from hf_domino._common.verdict import load_per_core
from hf_domino.evaluation.check.estimate import Estimate
from hf_domino.evaluation.check.measure import (
    Measurement,
    Text,
    by_context,
    measure_variants,
    time_prompts,
    write_text,
)
from hf_domino.evaluation.check.positions import PositionFit, fit_by_position
from hf_domino.evaluation.check.prompts import prepare_prompts
from hf_domino.evaluation.check.verdict import TOO_FEW, Cause, CheckResult, decide
from hf_domino.evaluation.check.width import WidthProbe, probe_width
from hf_domino.methods import DominoDraftModel
from hf_domino.targets.compatibility import check_causal, check_drafter, check_target, drafter_of
from hf_domino.targets.identity import TargetIdentity, identity_of, recognise

__all__ = ["Cause", "CheckResult", "Estimate", "Measurement", "PositionFit", "WidthProbe", "check_fit", "probe_width"]

MAX_NEW_TOKENS = 64  # per prompt
PROMPTS_AT_A_TIME = 4  # after which the verdict shows whether more are needed


def check_fit(
    drafter: DominoDraftModel,
    target: PreTrainedModel,
    tokenizer: Any = None,
    prompts: Sequence[Any] | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    progress: bool = False,
) -> CheckResult:
    """Measure whether a drafter fits its target, and find the likely causes if it does not.

    It generates text with the drafter, as configured and in variants such as other layers, until the verdict is outside
    the sampling error. Unless the drafter does not fit, it then times a few prompts.

    Args:
        drafter (`DominoDraftModel`): The drafter, or PEFT's wrapper around it. It is not changed.
        target (`PreTrainedModel`): The target. It is not changed.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Defaults to the tokenizer that is saved with the target.
        prompts (`Sequence`, *optional*): Texts, messages, records of `messages` and `tools`, or token ids. Defaults to
            a dozen short prompts, each in every mode of the chat template. Four prompts can be enough.
        max_new_tokens (`int`, *optional*, defaults to 64): Number of tokens to generate per prompt.
        progress (`bool`, *optional*, defaults to `False`): Show a progress bar.

    Returns:
        [`CheckResult`]: `fits`, `causes` and the measurements; print it for a table.

    Raises:
        ValueError: If sizes, layers or model type differ, [`probe_width`] fails, or there is nothing to measure.

    Example:
    ```python
    >>> from transformers import Qwen3Config, Qwen3ForCausalLM
    >>> from hf_domino import DominoConfig, DominoDraftModel, check_fit
    >>> config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, head_dim=16,
    ...                      num_attention_heads=2, num_key_value_heads=1, eos_token_id=None)
    >>> target = Qwen3ForCausalLM(config)
    >>> drafter = DominoDraftModel(DominoConfig.for_target(target.config, block_size=8))
    >>> result = check_fit(drafter, target, prompts=[[1, 2, 3], [4, 5]])
    >>> result.fits, result.causes[0].name
    (False, 'untrained')

    ```
    """
    drafter = _checked(drafter, target)
    prepared = prepare_prompts(target, tokenizer, prompts)
    texts: dict[str, list[Text]] = defaultdict(list)  # by mode
    found: list[tuple[dict[str, list[int]], torch.Tensor]] = []  # for each text: rounds of the variants, distances
    view = drafter.view(draft_length="full")  # has its own statistics; all texts share what it captures on a GPU
    for start in tqdm(range(0, len(prepared), PROMPTS_AT_A_TIME), "self-test", leave=False, disable=not progress):
        for prompt in prepared[start : start + PROMPTS_AT_A_TIME]:
            text = write_text(view, target, prompt, max_new_tokens)
            texts[prompt.mode].append(text)
            found.append(measure_variants(drafter, target, text))
        modes = {mode: [text.acceptance_lengths for text in some] for mode, some in texts.items()}
        variants = {name: [lengths[name] for lengths, _ in found] for name in found[0][0]}
        result = decide(_measured(modes), _measured(variants), _is_fresh(drafter), _is_recorded(drafter, target))
        if result.verdict != TOO_FEW:
            break
    speed_ups = [] if result.causes else time_prompts(drafter, target, prepared, max_new_tokens)
    contexts = by_context([text for some in texts.values() for text in some])
    positions = fit_by_position([apart for _, apart in found])
    return replace(result, load=load_per_core(), contexts=contexts, positions=positions, speed_ups=speed_ups)


def _is_recorded(drafter: DominoDraftModel, target: PreTrainedModel) -> bool:
    """Return whether the target has the weights that the drafter's configuration records."""
    recorded = TargetIdentity.recorded_in(drafter.config)
    return recorded is not None and recorded.has_weights_of(identity_of(target)) is True


def _measured(found: Mapping[str, list[list[int]]]) -> list[Measurement]:
    return [Measurement(*one) for one in found.items()]


def _checked(drafter: Any, target: PreTrainedModel) -> DominoDraftModel:
    """Return the drafter without wrappers, after checking that it can be measured with this target."""
    unwrapped = drafter_of(drafter)
    if unwrapped is None:
        remedy = "The order is check_fit(drafter, target, tokenizer)."
        raise invalid_argument("drafter", "a DominoDraftModel", type(drafter).__name__, remedy)
    check_drafter(unwrapped)
    check_target(unwrapped.config, target)
    check_causal(target)
    unwrapped.config.check_supports("check_fit")
    probe_width(target)
    recognise(unwrapped.config, target)
    return unwrapped


def _is_fresh(drafter: DominoDraftModel) -> bool:
    """Return whether the norms still have their initial values, which training changes within a few steps."""
    # In half precision, norms round to 1 again after a short training, so a correction head that is not zero also
    # counts as trained.
    head = drafter.head
    if head is not None and bool(head.up.weight.any()):
        return False
    norms = [weight for name, weight in drafter.named_parameters() if "norm" in name]
    return all(bool((weight == 1).all()) for weight in norms)

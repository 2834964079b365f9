"""Which processors there are, and how each of them is applied to many positions.

Those that look at the scores only go through as they are, those with a known effect by it, and all others one position
after the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors.effects import (
    Banned,
    BiasedSequences,
    Effect,
    Forced,
    GreenTokens,
    LengthDecay,
    PromptNGrams,
    PromptPenalty,
    RepeatedNGrams,
    SeenPenalty,
)

# Look at the scores only: all positions of a block go through at once as they are.
PREFIX_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.TopHLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
)
CHECKS_LAW = (hf.EtaLogitsWarper, hf.TopHLogitsWarper)  # raise where all tokens are forbidden
EFFECTS: dict[type, Callable[[Any], Effect | None]] = {
    hf.MinLengthLogitsProcessor: lambda p: Banned(p, p.eos_token_id, range(p.min_length)),
    hf.MinNewTokensLengthLogitsProcessor: lambda p: Banned(
        p, p.eos_token_id, range(p.prompt_length_to_skip + p.min_new_tokens)
    ),
    hf.SuppressTokensLogitsProcessor: lambda p: Banned(p, p.suppress_tokens, range(sys.maxsize)),
    hf.SuppressTokensAtBeginLogitsProcessor: lambda p: Banned(p, p.begin_suppress_tokens, _only(p.begin_index)),
    hf.ForcedBOSTokenLogitsProcessor: lambda p: Forced(p, p.bos_token_id, _only(1)),
    hf.ForcedEOSTokenLogitsProcessor: lambda p: Forced(p, p.eos_token_id, _only(p.max_length - 1)),
    hf.ExponentialDecayLengthPenalty: LengthDecay,
    hf.RepetitionPenaltyLogitsProcessor: SeenPenalty,
    hf.EncoderRepetitionPenaltyLogitsProcessor: PromptPenalty,
    hf.NoRepeatNGramLogitsProcessor: RepeatedNGrams,
    hf.EncoderNoRepeatNGramLogitsProcessor: PromptNGrams,
    hf.SequenceBiasLogitsProcessor: BiasedSequences,
    hf.NoBadWordsLogitsProcessor: BiasedSequences,
    # By the candidate itself it sorts the vocabulary and draws forty lists for each position.
    hf.WatermarkLogitsProcessor: lambda p: GreenTokens(p) if p.seeding_scheme == "lefthash" else None,
}
# Functions of prefix and scores alone: safe to run on drafted prefixes that may be rejected.
STATELESS = (*PREFIX_FREE, *EFFECTS, hf.PrefixConstrainedLogitsProcessor)


def _only(length: int) -> range:
    return range(length, length + 1)


def effect_of(processor: LogitsProcessor) -> Effect | None:
    """The effect of a processor, if it is known."""
    known = EFFECTS.get(type(processor))
    return None if known is None else known(processor)


def one_by_one(
    processor: LogitsProcessor, scores: torch.Tensor, prefixes: Prefixes, is_open: list[bool] | None = None
) -> torch.Tensor:
    """Ask a processor itself, once for each length of text.

    Args:
        processor (`LogitsProcessor`): Of any kind.
        scores (`torch.Tensor`): `[R, V]`, not written to.
        prefixes ([`Prefixes`]): What each of the R positions sees.
        is_open (`list[bool]`, *optional*): Which of them it is asked about; the others' scores stay as they are.
    """
    result, lengths = scores.clone(), prefixes.lengths
    asked = [index for index in range(len(lengths)) if is_open is None or is_open[index]]
    for length in sorted({lengths[index] for index in asked}):
        members = [index for index in asked if lengths[index] == length]
        own = _for_rows(processor, [prefixes.rows[index] for index in members])
        result[members] = own(prefixes.ids[members, :length], scores[members]).to(result.dtype)
    return result


def _for_rows(processor: LogitsProcessor, rows: list[int]) -> LogitsProcessor:
    """A processor that treats the rows it is given as these rows of the batch; most treat all rows alike."""
    if not isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        return processor
    allowed, per_prompt = processor._prefix_allowed_tokens_fn, processor._num_beams  # newer releases: of its sequences
    return hf.PrefixConstrainedLogitsProcessor(lambda index, ids: allowed(rows[index] // per_prompt, ids), num_beams=1)

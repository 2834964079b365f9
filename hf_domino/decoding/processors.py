"""Transformers' logits processors, and how each of them is applied to many positions at once.

A processor of Transformers handles one position of each sequence at a time, and writes scores for the whole vocabulary.
Processors that only look at the scores are applied as they are. Most of the others have an `Effect`. An effect says
which tokens change at many positions, each with its own prefix, and computes their new scores with the arithmetic of
the original. The same effect works on the scores of the whole vocabulary, where it equals the original bit for bit, and
on the scores of a few candidates. All remaining processors are called position by position.

Shapes: R positions, C tokens that change at each, T tokens so far, V vocabulary, W windows, n tokens of an n-gram.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.scores import Scores

Holder = Callable[[str, torch.Tensor], torch.Tensor]  # copies a named tensor to a place where captured graphs find it
HELD_ROWS = 64  # values of sequences are padded to this length, so that batches of up to 64 share one captured shape
GREEN_LISTS = 64  # how many green lists of a watermark are cached, enough for a round and its drafts
# These only look at the scores, so they are applied as they are to all positions of a block at once.
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
CHECKS_DISTRIBUTION = (hf.EtaLogitsWarper, hf.TopHLogitsWarper)  # these raise an error if all tokens are forbidden


class Effect:
    """The effect of one processor on the scores of many positions.

    Args:
        processor (`LogitsProcessor`): The original.
        act (`Callable`): Changes the scores as the processor would, given the prefix that each position sees.
        key (`Hashable`, *optional*): The parameters that a captured function with this effect depends on. None if the
            effect cannot be captured, because it copies results to the host.
        may_lift (`bool`, *optional*, defaults to `False`): Whether it can make an unlikely token likely.
    """

    def __init__(
        self,
        processor: Any,
        act: Callable[[Any, Scores, Prefixes], None] | None = None,
        key: Hashable = None,
        may_lift: bool = False,
    ):
        self.processor = processor
        self._act = act
        self.may_lift = may_lift
        if key is None:
            self.key = None
        else:
            self.key = (type(processor), key)

    def hold(self, hold: Holder) -> None:
        """Replace each of its tensors by what `hold` returns for a name and the tensor: a copy that graphs can find."""

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Change the scores of R positions as the processor would, given the prefix that each of them sees."""
        assert self._act is not None
        self._act(self.processor, scores, prefixes)


class Banned(Effect):
    """Forbids tokens while the text has certain lengths. A forbidden token stays forbidden, so this can come first.

    Args:
        processor (`LogitsProcessor`): The original.
        ids (`torch.Tensor` or `int`): The tokens.
        lengths (`range`): The lengths of a text, in tokens, after which the next token is restricted.
        is_forced (`bool`, *optional*, defaults to `False`): Whether to forbid all other tokens instead of these.
    """

    def __init__(self, processor: Any, ids: torch.Tensor | int, lengths: range, is_forced: bool = False):
        super().__init__(processor, key=())  # the key is empty, because tokens and lengths are held as tensors
        self._ids = torch.as_tensor(ids).flatten()
        self._lengths = lengths
        self._is_forced = is_forced
        self._bounds: torch.Tensor | None = None  # first length and end, [2], where captured graphs find them

    def hold(self, hold: Holder) -> None:
        """Copy tokens and lengths to a place where captured graphs find them."""
        self._ids = hold("ids", self._ids)
        self._bounds = hold("lengths", torch.tensor((self._lengths.start, self._lengths.stop)))

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Forbid the tokens, or all others, at the positions whose text has one of the lengths."""
        if (where := self.where(prefixes)) is not None:
            self.act(scores, where)

    def where(self, prefixes: Prefixes) -> torch.Tensor | None:
        """The positions that it affects, `[R, 1]` bool; None if the host can tell that there are none."""
        return prefixes.within(self._lengths, self._bounds)

    def act(self, scores: Scores, where: torch.Tensor) -> None:
        """Forbid the tokens, or all others, at the positions where `where` `[R, 1]` is true."""
        if self._is_forced:
            scores.forbid_all(where)
        scores.change(self._ids.to(where.device), where, torch.zeros_like if self._is_forced else _ban)


class BiasedSequences(Effect):
    """The effect of [`SequenceBiasLogitsProcessor`] and of bad words: a bias for tokens that complete a sequence."""

    def __init__(self, processor: Any):
        # Even a negative bias counts as lifting, so that tokens which are always forbidden do not become candidates.
        super().__init__(processor, may_lift=True)
        longer = [(tokens, bias) for tokens, bias in processor.sequence_bias.items() if len(tokens) > 1]
        lengths = [len(tokens) for tokens, _ in longer]
        if "multi_token_biases" in vars(processor):  # newer releases of Transformers add biases up length by length
            longer.sort(key=lambda entry: lengths.index(len(entry[0])))
        self._groups = [list(group) for _, group in groupby(longer, key=lambda entry: len(entry[0]))]
        self._ids = torch.tensor(sorted({tokens[-1] for tokens in processor.sequence_bias}))
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}
        self._tensors: list[tuple[torch.Tensor, ...]] | None = None  # tensors of each group, on the scores' device
        self._alone = torch.empty(0)  # [C], biases of single tokens, which always apply

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Add the bias of each sequence that the next token would complete."""
        if self._tensors is None:
            self._prepare(scores, prefixes.ids)
        bias = self._alone.repeat(len(prefixes.rows), 1)  # [R, C]
        for heads, places, biases in self._tensors or ():
            is_long = prefixes.ends >= heads.shape[1]
            matches = (prefixes.last_tokens(heads.shape[1])[:, None] == heads).all(dim=-1) & is_long
            met = matches.any(dim=0).nonzero()[:, 0]
            if len(met):
                bias.index_add_(1, places[met], torch.where(matches[:, met], biases[met], 0.0))
        scores.change(self._ids, None, torch.add, bias)

    def _prepare(self, scores: Scores, ids: torch.Tensor) -> None:
        """Let the original validate its tokens, and copy all tensors to the device."""
        self.processor(ids[:1, :1], scores.tensor.new_zeros(1, scores.vocab_size))
        self._ids = self._ids.to(ids.device)
        self._alone = self.processor.length_1_bias[self._ids]
        self._tensors = [
            (
                torch.tensor([tokens[:-1] for tokens, _ in group], device=ids.device),
                torch.tensor([self._places[tokens[-1]] for tokens, _ in group], device=ids.device),
                torch.tensor([bias for _, bias in group], dtype=torch.float32, device=ids.device),
            )
            for group in self._groups
        ]


class SeenPenalty(Effect):
    """The effect of [`RepetitionPenaltyLogitsProcessor`]: it penalises tokens of the text, except an ignored start."""

    def __init__(self, processor: Any):
        ignored = processor.prompt_ignore_length
        self._ignored = ignored.tolist() if isinstance(ignored, torch.Tensor) else ignored or 0
        if isinstance(self._ignored, list) and len(set(self._ignored)) == 1:
            self._ignored = self._ignored[0]
        self._held: torch.Tensor | None = None  # how many tokens each sequence ignores, where captured graphs find it
        # The penalty itself is part of the key, because division by a tensor would round the scores differently. If
        # sequences ignore different numbers of tokens, these numbers are held as a tensor.
        key = processor.penalty, "by row" if isinstance(self._ignored, list) else self._ignored
        super().__init__(processor, key=key, may_lift=processor.penalty < 1)

    def hold(self, hold: Holder) -> None:
        """Copy each sequence's number of ignored tokens to a place where captured graphs find it."""
        if isinstance(self._ignored, list):
            missing = max(HELD_ROWS - len(self._ignored), 0)
            self._held = hold("ignored", torch.tensor(self._ignored + [0] * missing))

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Penalise the tokens of the text that each position sees."""
        starts = self._ignored
        if isinstance(starts, list):
            starts = prefixes.of_rows(starts, self._held)
        penalise = partial(_penalise, penalty=self.processor.penalty)
        scores.change(prefixes.ids, prefixes.between(starts), penalise)


def _penalise_prompt(processor: Any, scores: Scores, prefixes: Prefixes) -> None:
    """Penalise the tokens of the prompt. The penalty is usually below 1, which makes them more likely."""
    rows = prefixes.per_row(prefixes.rows)[:, 0]
    prompts = processor.encoder_input_ids.to(rows.device)[rows]
    scores.change(prompts, None, partial(_penalise, penalty=processor.penalty))


def _ban_repeated(processor: Any, scores: Scores, prefixes: Prefixes) -> None:
    """Forbid every token that would repeat an n-gram of the text."""
    # Those are the last tokens of the text's n-grams whose first n - 1 tokens equal the last n - 1 tokens of the text.
    size = processor.ngram_size
    ids = prefixes.ids
    if ids.shape[1] < size:
        return
    windows = ids.unfold(1, size, 1)  # [R, W, n]
    ends = torch.arange(size, ids.shape[1] + 1, device=ids.device)
    begins_alike = (windows[..., :-1] == prefixes.last_tokens(size - 1)[:, None]).all(dim=-1)
    scores.change(windows[..., -1], begins_alike & (ends <= prefixes.ends), _ban)


def _ban_prompts(processor: Any, scores: Scores, prefixes: Prefixes) -> None:
    """Forbid every token that would repeat an n-gram of the prompt."""
    ngrams = processor.generated_ngrams
    count = processor.ngram_size - 1
    last_tokens = prefixes.last_tokens(count).tolist()
    banned = [
        ngrams[row].get(tuple(ending), []) if length >= count else []
        for row, ending, length in zip(prefixes.rows, last_tokens, prefixes.lengths, strict=True)
    ]
    if longest := max(map(len, banned)):
        ids = torch.tensor([tokens + [-1] * (longest - len(tokens)) for tokens in banned])
        scores.change(ids.to(prefixes.ids.device), None, _ban)


def _green_tokens(processor: Any) -> Effect | None:
    """The effect of a watermark: it raises the scores of a part of the vocabulary that the last token determines."""
    if processor.seeding_scheme != "lefthash":
        return None  # the other scheme depends on the candidates: it sorts them and draws forty lists at each position

    @lru_cache(GREEN_LISTS)
    def behind(token: int, vocab_size: int) -> torch.Tensor:
        device = processor.rng.device
        green = processor._get_greenlist_ids(torch.tensor([token], device=device))
        return torch.zeros(vocab_size, dtype=torch.float32, device=device).index_fill(0, green, processor.bias)

    def act(processor: Any, scores: Scores, prefixes: Prefixes) -> None:
        is_behind = [length >= processor.context_width for length in prefixes.lengths]
        amounts = torch.stack([behind(token, scores.vocab_size) for token in prefixes.last()[:, 0].tolist()])
        scores.add(amounts if all(is_behind) else amounts * prefixes.per_row(is_behind))

    return Effect(processor, act)


def _ban(scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf)


def _penalise(scores: torch.Tensor, penalty: float) -> torch.Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def _only(length: int) -> range:
    return range(length, length + 1)


EFFECTS: dict[type, Callable[[Any], Effect | None]] = {
    hf.MinLengthLogitsProcessor: lambda p: Banned(p, p.eos_token_id, range(p.min_length)),
    hf.MinNewTokensLengthLogitsProcessor: lambda p: Banned(
        p, p.eos_token_id, range(p.prompt_length_to_skip + p.min_new_tokens)
    ),
    hf.SuppressTokensLogitsProcessor: lambda p: Banned(p, p.suppress_tokens, range(sys.maxsize)),
    hf.SuppressTokensAtBeginLogitsProcessor: lambda p: Banned(p, p.begin_suppress_tokens, _only(p.begin_index)),
    hf.ForcedBOSTokenLogitsProcessor: lambda p: Banned(p, p.bos_token_id, _only(1), is_forced=True),
    hf.ForcedEOSTokenLogitsProcessor: lambda p: Banned(p, p.eos_token_id, _only(p.max_length - 1), is_forced=True),
    hf.RepetitionPenaltyLogitsProcessor: SeenPenalty,
    hf.EncoderRepetitionPenaltyLogitsProcessor: lambda p: Effect(p, _penalise_prompt, may_lift=p.penalty < 1),
    hf.EncoderNoRepeatNGramLogitsProcessor: lambda p: Effect(p, _ban_prompts),
    hf.NoRepeatNGramLogitsProcessor: lambda p: Effect(p, _ban_repeated, key=p.ngram_size),
    hf.SequenceBiasLogitsProcessor: BiasedSequences,
    hf.NoBadWordsLogitsProcessor: BiasedSequences,
    hf.WatermarkLogitsProcessor: _green_tokens,
}
# These are functions of the prefix and the scores alone, so they can run on drafted prefixes that may be rejected.
STATELESS = (*PREFIX_FREE, *EFFECTS, hf.ExponentialDecayLengthPenalty, hf.PrefixConstrainedLogitsProcessor)


def effect_of(processor: LogitsProcessor) -> Effect | None:
    """The effect of a processor; None if it has none."""
    known = EFFECTS.get(type(processor))
    return None if known is None else known(processor)


def one_by_one(
    processor: LogitsProcessor, scores: torch.Tensor, prefixes: Prefixes, is_open: list[bool] | None = None
) -> torch.Tensor:
    """Call a processor itself, once for each length of text.

    Args:
        processor (`LogitsProcessor`): Any logits processor.
        scores (`torch.Tensor`): Scores `[R, V]`, which are not modified.
        prefixes ([`Prefixes`]): The text that each of the R positions sees.
        is_open (`list[bool]`, *optional*): The positions to call it for; the scores of the others stay as they are.
            Defaults to all positions.
    """
    result = scores.clone()
    lengths = prefixes.lengths
    asked = [index for index in range(len(lengths)) if is_open is None or is_open[index]]
    for length in sorted({lengths[index] for index in asked}):
        members = [index for index in asked if lengths[index] == length]
        own = _for_rows(processor, [prefixes.rows[index] for index in members])
        result[members] = own(prefixes.ids[members, :length], scores[members]).to(result.dtype)
    return result


def _for_rows(processor: LogitsProcessor, rows: list[int]) -> LogitsProcessor:
    """A processor that knows its inputs as these sequences of the batch; most treat all sequences alike."""
    if not isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        return processor
    # In newer releases, `_num_beams` is the number of sequences per prompt.
    allowed = processor._prefix_allowed_tokens_fn
    per_prompt = processor._num_beams
    return hf.PrefixConstrainedLogitsProcessor(lambda index, ids: allowed(rows[index] // per_prompt, ids), num_beams=1)

"""The effects of Transformers' processors, in terms of the few tokens each of them touches.

A processor sees one position at a time and writes a whole vocabulary for it. Its `Effect` names tokens of many
positions, each with its own prefix, and what becomes of their scores, by the arithmetic of the original. It is written
once and works on the scores of the whole vocabulary, where it equals the original bit for bit, and on those of a few
candidates.

Shapes: R positions, C tokens named for each, S sequences, T tokens so far, V vocabulary, W windows, n of an n-gram.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import groupby
from typing import Any

import torch
from transformers.generation import logits_process as hf

from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.processors.scores import Scores

Holder = Callable[[str, torch.Tensor], torch.Tensor]  # copies a named tensor to where graphs find it
GREEN_LISTS = 64  # kept of a watermark: those of a round and its drafts


class Effect:
    """The effect of one processor on the scores of positions whose prefixes are known.

    Args:
        processor (`LogitsProcessor`): The original.
    """

    def __init__(self, processor: Any):
        self.processor = processor

    @property
    def may_lift(self) -> bool:
        """Whether it may make an unlikely token a likely one."""
        return False

    @property
    def num_guesses(self) -> int:
        """How many tokens [`foresee`] lifts that the block's own tokens may not lift after all."""
        return 0

    @property
    def key(self) -> Hashable | None:
        """Key of a stage that it is part of; None where it is part of none: it reads back."""
        return None

    def hold(self, hold: Holder) -> None:
        """Keep its tensors where graphs find them.

        Args:
            hold (`Callable`): Gives what takes the place of a tensor, by a name for it.
        """

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Change the scores as the processor would.

        Args:
            scores: Of R positions.
            prefixes ([`Prefixes`]): What each of them sees.
        """
        raise NotImplementedError

    def foresee(self, scores: Scores, prefixes: Prefixes) -> None:
        """Change the scores as far as can be told before the block's own tokens are chosen.

        Args:
            scores: Of R positions.
            prefixes ([`Prefixes`]): What each of them sees, with the last known token in place of the block's own.
        """
        self.apply(scores, prefixes)


class Banned(Effect):
    """Tokens that are forbidden at some lengths of the text. What it forbids stays forbidden, so it may go first.

    Args:
        processor (`LogitsProcessor`): The original.
        ids (`torch.Tensor` or `int`): The tokens.
        lengths (`range`): Behind texts of that many tokens it does something.
    """

    def __init__(self, processor: Any, ids: torch.Tensor | int, lengths: range):
        super().__init__(processor)
        self._ids, self._lengths = torch.as_tensor(ids).flatten(), lengths
        self._bounds: torch.Tensor | None = None  # of the lengths, [2], where graphs find it

    @property
    def key(self) -> Hashable | None:
        """Its kind: tokens and lengths are held."""
        return (type(self.processor),)

    def hold(self, hold: Holder) -> None:
        """Put tokens and lengths where graphs find them."""
        self._ids = hold("ids", self._ids)
        self._bounds = hold("lengths", torch.tensor((self._lengths.start, self._lengths.stop)))

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Forbid the tokens."""
        if (where := self.where(prefixes)) is not None:
            self.act(scores, where)

    def where(self, prefixes: Prefixes) -> torch.Tensor | None:
        """At which positions it does something, `[R, 1]` bool; None where the host knows of none."""
        return prefixes.where(self._acts_at)

    def act(self, scores: Scores, where: torch.Tensor) -> None:
        """Forbid the tokens at some positions `[R, 1]`."""
        scores.change(self._ids.to(where.device), where, _ban)

    def _acts_at(self, length: Any) -> Any:
        if isinstance(length, int):
            return length in self._lengths
        first, end = (self._lengths.start, self._lengths.stop) if self._bounds is None else self._bounds
        return (first <= length) & (length < end)


class Forced(Banned):
    """Tokens beside which all others are forbidden at some lengths of the text."""

    def act(self, scores: Scores, where: torch.Tensor) -> None:
        """Forbid all but the tokens at some positions `[R, 1]`."""
        scores.forbid_all(where)
        scores.change(self._ids.to(where.device), where, torch.zeros_like)


class LengthDecay(Effect):
    """[`ExponentialDecayLengthPenalty`]: the end of the text becomes likelier with each token."""

    def __init__(self, processor: Any):
        super().__init__(processor)
        self._ids = processor.eos_token_id.flatten()
        # Older releases turn a forbidden end of text into a NaN.
        forbidden, text = torch.tensor([[-torch.inf]]), torch.zeros(1, 1)
        self._spares_infinite = not hf.ExponentialDecayLengthPenalty((0, 2.0), 0, 0)(text, forbidden).isnan().any()

    @property
    def may_lift(self) -> bool:
        """Whether the end of the text becomes likelier."""
        return self.processor.regulation_factor > 1

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Add to the end of the text's score a part of its size."""
        factor, start = self.processor.regulation_factor, self.processor.regulation_start
        steps = [length - start for length in prefixes.lengths]
        if max(steps) > 0:
            parts = [pow(factor, count) - 1 if count > 0 else 0.0 for count in steps]
            where = prefixes.per_row([count > 0 for count in steps])
            scores.change(self._ids.to(prefixes.ids.device), where, self._raise, prefixes.per_row(parts, torch.float32))

    def _raise(self, scores: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
        more = scores.abs() * parts
        return scores + (more.masked_fill(~scores.isfinite(), 0.0) if self._spares_infinite else more)


class SeenPenalty(Effect):
    """[`RepetitionPenaltyLogitsProcessor`]: tokens of the text become less likely."""

    def __init__(self, processor: Any):
        super().__init__(processor)
        ignored = processor.prompt_ignore_length
        self._ignored = ignored.tolist() if isinstance(ignored, torch.Tensor) else ignored or 0

    @property
    def may_lift(self) -> bool:
        """Whether it is a reward."""
        return self.processor.penalty < 1

    @property
    def key(self) -> Hashable | None:
        """Its numbers: divided by a tensor, scores would be rounded otherwise."""
        return type(self.processor), self.processor.penalty, str(self._ignored)

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Penalise what stands in the text."""
        starts = [self._ignored[row] if isinstance(self._ignored, list) else self._ignored for row in prefixes.rows]
        scores.change_seen(prefixes, starts, partial(_penalise, penalty=self.processor.penalty))


class PromptPenalty(Effect):
    """[`EncoderRepetitionPenaltyLogitsProcessor`]: tokens of the prompt become more likely."""

    @property
    def may_lift(self) -> bool:
        """Whether it is a reward."""
        return self.processor.penalty < 1

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Penalise what stands in the prompt, by less than nothing as a rule."""
        prompts = self.processor.encoder_input_ids
        rows = prefixes.per_row(prefixes.rows)[:, 0]
        scores.change(prompts.to(rows.device)[rows], None, partial(_penalise, penalty=self.processor.penalty))


class RepeatedNGrams(Effect):
    """[`NoRepeatNGramLogitsProcessor`]: tokens that would end an n-gram of the text once more are forbidden."""

    @property
    def key(self) -> Hashable | None:
        """Its size."""
        return type(self.processor), self.processor.ngram_size

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Forbid the last token of each window of the text that begins as the text ends."""
        size, ids = self.processor.ngram_size, prefixes.ids
        if ids.shape[1] < size:
            return
        windows = ids.unfold(1, size, 1)  # [R, W, n]
        ends = torch.arange(size, ids.shape[1] + 1, device=ids.device)
        begins_alike = (windows[..., :-1] == prefixes.endings(size - 1)[:, None]).all(dim=-1)
        scores.change(windows[..., -1], begins_alike & (ends <= prefixes.ends), _ban)


class PromptNGrams(Effect):
    """[`EncoderNoRepeatNGramLogitsProcessor`]: tokens that would end an n-gram of the prompt are forbidden."""

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Forbid what followed the end of the text in the prompt."""
        ngrams, count = self.processor.generated_ngrams, self.processor.ngram_size - 1
        endings = prefixes.endings(count).tolist()
        banned = [
            ngrams[row].get(tuple(ending), []) if length >= count else []
            for row, ending, length in zip(prefixes.rows, endings, prefixes.lengths, strict=True)
        ]
        if longest := max(map(len, banned)):
            ids = torch.tensor([tokens + [-1] * (longest - len(tokens)) for tokens in banned])
            scores.change(ids.to(prefixes.ids.device), None, _ban)


class BiasedSequences(Effect):
    """[`SequenceBiasLogitsProcessor`], bad words too: what is added to tokens that would end certain sequences."""

    def __init__(self, processor: Any):
        super().__init__(processor)
        longer = [(tokens, bias) for tokens, bias in processor.sequence_bias.items() if len(tokens) > 1]
        lengths = [len(tokens) for tokens, _ in longer]
        if "multi_token_biases" in vars(processor):  # newer releases add up length by length
            longer.sort(key=lambda entry: lengths.index(len(entry[0])))
        self._groups = [list(group) for _, group in groupby(longer, key=lambda entry: len(entry[0]))]
        self._ids = torch.tensor(sorted({tokens[-1] for tokens in processor.sequence_bias}))
        self._places = {token: place for place, token in enumerate(self._ids.tolist())}
        self._tensors: list[tuple[torch.Tensor, ...]] | None = None  # of each group, where the scores are
        self._alone = torch.empty(0)  # [C], what is added always

    @property
    def may_lift(self) -> bool:
        """Always; and what is forbidden always need not be a candidate."""
        return True

    @property
    def num_guesses(self) -> int:
        """Ends of longer sequences."""
        return len({tokens[-1] for group in self._groups for tokens, bias in group if bias > 0})

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Add the bias of each sequence that the next token may end."""
        bias = self._prepared(scores, prefixes).repeat(len(prefixes.rows), 1)  # [R, C]
        for heads, places, biases in self._tensors or ():
            is_long = prefixes.ends >= heads.shape[1]
            matches = (prefixes.endings(heads.shape[1])[:, None] == heads).all(dim=-1) & is_long
            met = matches.any(dim=0).nonzero()[:, 0]
            if len(met):
                bias.index_add_(1, places[met], torch.where(matches[:, met], biases[met], 0.0))
        scores.change(self._ids, None, torch.add, bias)

    def foresee(self, scores: Scores, prefixes: Prefixes) -> None:
        """Add the bias of sequences of one token, and of each longer one that could be lifted."""
        bias = self._prepared(scores, prefixes)
        for _, places, biases in self._tensors or ():
            bias = bias.index_add(0, places, biases.clamp_min(0.0))
        scores.change(self._ids, None, torch.add, bias)

    def _prepared(self, scores: Scores, prefixes: Prefixes) -> torch.Tensor:
        """Biases that are always added, `[C]`; at first tokens are checked and all is put on the device."""
        device = prefixes.ids.device
        if self._tensors is None:
            self.processor(prefixes.ids[:1, :1], scores.tensor.new_zeros(1, scores.vocab_size))
            self._ids = self._ids.to(device)
            self._alone = self.processor.length_1_bias[self._ids]
            self._tensors = [
                (
                    torch.tensor([tokens[:-1] for tokens, _ in group], device=device),
                    torch.tensor([self._places[tokens[-1]] for tokens, _ in group], device=device),
                    torch.tensor([bias for _, bias in group], dtype=torch.float32, device=device),
                )
                for group in self._groups
            ]
        return self._alone


class GreenTokens(Effect):
    """[`WatermarkLogitsProcessor`] by the last token: a part of the vocabulary, drawn with it as seed, is likelier."""

    def __init__(self, processor: Any):
        super().__init__(processor)
        self._amounts: dict[int, torch.Tensor] = {}

    def apply(self, scores: Scores, prefixes: Prefixes) -> None:
        """Add the bias to the tokens that are green behind each position's last one."""
        if len(self._amounts) > GREEN_LISTS:
            self._amounts.clear()
        is_behind = [length >= self.processor.context_width for length in prefixes.lengths]
        amounts = torch.stack([self._behind(token, scores.vocab_size) for token in prefixes.last()[:, 0].tolist()])
        scores.add(amounts if all(is_behind) else amounts * prefixes.per_row(is_behind))

    def _behind(self, token: int, vocab_size: int) -> torch.Tensor:
        """Biases of each score behind a token, `[V]`."""
        if token not in self._amounts:
            device = self.processor.rng.device
            green = self.processor._get_greenlist_ids(torch.tensor([token], device=device))
            amounts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
            self._amounts[token] = amounts.index_fill(0, green, self.processor.bias)
        return self._amounts[token]


def _ban(scores: torch.Tensor) -> torch.Tensor:
    return torch.full_like(scores, -torch.inf)


def _penalise(scores: torch.Tensor, penalty: float) -> torch.Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)

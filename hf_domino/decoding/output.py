"""Committed tokens: where each row must stop, what streams out, and what `generate` returns.

Shapes: B batch, T tokens so far, N new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_domino._common.cache_name import CACHE
from hf_domino.decoding.prefixes import Prefixes
from hf_domino.decoding.stopping import KNOWN_CRITERIA, KnownStops


class CommittedSequences:
    """The tokens of a batch, grown a round at a time and cut exactly where plain `generate` would stop.

    Rows grow on their own. Where an end-of-text token is known, a row that stops is done; otherwise plain generation
    goes on with it until all rows have stopped, and so does this.

    Args:
        input_ids (`torch.Tensor`): Prompts `[B, T]`.
        stopping_criteria (`StoppingCriteriaList`): Asked about every new prefix of every row, one row at a time; of a
            batch, those of the caller are asked about all rows at a length that all have reached: they may compare.
        generation_config (`GenerationConfig`): For end-of-text ids, the length limit and the outputs wanted.
        streamer (`BaseStreamer`, *optional*): Receives each token once it is final, never one that is withdrawn.
        known ([`KnownStops`]): Those of the criteria that need not be asked.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
        known: KnownStops,
    ):
        self._ids = input_ids
        self._lengths = [input_ids.shape[1]] * len(input_ids)
        self._stops: list[int | None] = [None] * len(input_ids)  # length at which each row stopped
        self._prompt_length = self._streamed = input_ids.shape[1]
        self._values: list[list[int]] = [[] for _ in input_ids]  # the new tokens, on the host
        self._has_outputs = generation_config.return_dict_in_generate
        self._streamer = streamer
        self._pad = getattr(generation_config, "_pad_token_tensor", None)
        names: tuple[str, ...] = ()
        if generation_config.return_dict_in_generate:
            names = ("scores", "logits")
        # Of each row and new token, [V] each; those that are wanted.
        self._outputs: dict[str, list[list[torch.Tensor]]] = {
            name: [[] for _ in input_ids] for name in names if getattr(generation_config, f"output_{name}")
        }
        self._shown: int | None = None  # length of the text that a criterion or the streamer looks at
        self._known = known
        self._criteria = StoppingCriteriaList()
        self._of_batch = StoppingCriteriaList()
        for criterion in stopping_criteria:
            if type(criterion) not in KNOWN_CRITERIA:
                is_by_row = len(input_ids) == 1 or type(criterion).__module__.startswith("transformers.")
                (self._criteria if is_by_row else self._of_batch).append(criterion)
        self._asked = self._prompt_length  # length of the batch that its criteria were asked about
        # As plain generation asks: without it, rows that stopped are not padded.
        self._pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)

    @property
    def unfinished(self) -> list[int]:
        """Rows that still grow."""
        if self._pads_finished:
            return [row for row, stop in enumerate(self._stops) if stop is None]
        stops = [stop for stop in self._stops if stop is not None]
        longest = float("inf")
        if len(stops) == len(self._stops):
            longest = max(stops)
        elif self._known.max_length is not None:
            longest = self._known.max_length
        return [row for row, length in enumerate(self._lengths) if length < longest]

    @property
    def num_new_tokens(self) -> list[int]:
        """New tokens that `generate` returns of each row, padding not counted; all rows have stopped."""
        final = self._final_length()
        return [min(length, final) - self._prompt_length for length in self._lengths]

    @property
    def num_steps(self) -> int:
        """Steps that plain generation would have made by now: it makes them for all rows, until none is unfinished.

        Where a criterion or the streamer raised, that is by the text it was shown.
        """
        if self.unfinished:
            length = max(self._lengths)
        else:
            length = self._final_length()
        return (length if self._shown is None else self._shown) - self._prompt_length

    def num_new(self, rows: Sequence[int]) -> list[int]:
        """New tokens of these rows so far."""
        return [self._lengths[row] - self._prompt_length for row in rows]

    def prefixes(self, rows: Sequence[int]) -> Prefixes:
        """Tokens so far of these rows."""
        if len(rows) == len(self._lengths):
            ids = self._ids
        else:
            ids = self._ids[list(rows)]
        return Prefixes(ids, [self._lengths[row] for row in rows], list(rows))

    def tokens(self, row: int, start: int) -> list[int]:
        """Tokens of a row from a place on; only those of the prompt are waited for."""
        if start < self._prompt_length:
            prompt = self._ids[row, start : self._prompt_length].tolist()
        else:
            prompt = []
        return prompt + self._values[row][max(start - self._prompt_length, 0) :]

    def commit(
        self,
        rows: Sequence[int],
        tokens: torch.Tensor,
        counts: Sequence[int],
        logits: torch.Tensor,
        scores: torch.Tensor,
        values: Sequence[Sequence[int]] | None = None,
    ) -> list[int]:
        """Append new tokens to these rows, each up to its first stop.

        Args:
            rows (`Sequence[int]`): R rows of the batch.
            tokens (`torch.Tensor`): `[R, N]`.
            counts (`Sequence[int]`): How many of them are meant, per row.
            logits (`torch.Tensor`): The target's logits they were chosen from, `[R, N, V]` or more positions.
            scores (`torch.Tensor`): The same after processors.
            values (`Sequence[Sequence[int]]`, *optional*): The tokens, where the host knows them already.

        Returns:
            `list[int]`: How many were kept, per row.
        """
        self._reserve(tokens.shape[1])
        values = tokens.tolist() if values is None else values
        kept = []
        for index, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start = self._lengths[row]
            new = tokens[index, :count]
            self._ids[row, start : start + count] = new
            for name, outputs in self._outputs.items():
                source = scores if name == "scores" else logits
                outputs[row] += list(source[index, :count].to(torch.float32, copy=True))
            self._values[row] += values[index]
            try:
                kept.append(self._keep(row, values[index][:count]))
            except BaseException:  # what a criterion was asked about before is streamed, as in plain generation
                self._cut(row, start if self._shown is None else self._shown - 1)
                self._stream()
                raise
            self._cut(row, start + kept[-1])
        while self._of_batch and self._asked < self._num_settled:
            self._ask_of_batch()
        self._known.warn(self._ids[:1, : max(self._lengths)])
        self._stream()
        return kept

    def _reserve(self, num_tokens: int) -> None:
        """Room for `num_tokens` more in every row; the prompt tensor itself is never written to."""
        needed = max(self._lengths) + num_tokens
        if needed > self._ids.shape[1]:
            grown = self._ids.new_zeros(len(self._lengths), max(2 * needed, 64))
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown

    def _cut(self, row: int, length: int) -> None:
        """Keep a row up to a length."""
        self._lengths[row] = length
        kept: list[list[list[Any]]] = [self._values, *self._outputs.values()]
        for each in kept:
            del each[row][length - self._prompt_length :]

    @property
    def _num_settled(self) -> int:
        """Length that all rows have reached, ended ones padded."""
        growing = [self._lengths[row] for row in self.unfinished]
        return min(growing) if growing else self._final_length()

    def _ask_of_batch(self) -> None:
        """Ask a batch's criteria about one length more; a row that ends there loses what it has grown beyond."""
        self._asked += 1
        ends = self._ask(self._of_batch, self._padded(self._asked), slice(None))
        for row, stop in enumerate(self._stops):
            if ends[row] and (stop is None or stop > self._asked):
                self._stops[row] = self._asked
                if self._pads_finished:
                    self._cut(row, self._asked)

    def _ask(self, criteria: StoppingCriteriaList, ids: torch.Tensor, rows: slice) -> list[bool]:
        """Which texts `[R, L]` criteria end, with the scores of these rows."""
        self._shown = ids.shape[1]
        scores = self._outputs.get("scores")
        count = self._shown - self._prompt_length
        ends = criteria(ids, None if scores is None else _per_token(scores[rows], count))
        self._shown = None
        return ends.flatten().tolist()

    def _keep(self, row: int, values: Sequence[int]) -> int:
        """How many of the tokens just written stay: up to the first stop, unless plain generation goes on behind it."""
        start = self._lengths[row]
        here = slice(row, row + 1)
        for length, value in enumerate(values, start=start + 1):
            if self._stops[row] is not None:
                break
            is_end = self._known.stops_at(length, value)
            if self._criteria:
                is_end = self._ask(self._criteria, self._ids[here, :length], here)[0] or is_end
            if is_end:
                self._stops[row] = length
                if self._pads_finished or len(self._stops) == 1:
                    return length - start
        return len(values)

    def _stream(self) -> None:
        """Send what is final in all rows, one token of each at a time."""
        if self._streamer is None:
            return
        # Of a row that may still be padded nothing more is to come before the others have caught up.
        final = self._num_settled
        ids = self._padded(final)
        for position in range(self._streamed, final):
            self._shown = position + 1
            self._streamer.put(ids[:, position].cpu())
        self._shown = None
        self._streamed = max(final, self._streamed)

    def _final_length(self) -> int:
        if self._pads_finished:
            return max(self._lengths)
        return max(stop or 0 for stop in self._stops)

    def _padded(self, length: int) -> torch.Tensor:
        """Ids `[B, length]`, padding behind the rows that are shorter."""
        ids = self._ids[:, :length]
        lengths = torch.tensor(self._lengths)[:, None]
        if bool((lengths >= length).all()):
            return ids
        behind = (torch.arange(length) >= lengths).to(ids.device)
        assert self._pad is not None, "generate asks for a padding token where rows can end early"
        return torch.where(behind, self._pad.to(ids.device), ids)

    def result(self, cache: Any, **outputs: Any) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """End the stream and return what `generate` returns.

        Args:
            cache (`Cache`): The target's.
            outputs: Further fields of the returned dictionary.
        """
        length = self._final_length()
        if self._streamer is not None:
            self._streamer.end()
        sequences = self._padded(length).clone()
        if not self._has_outputs:
            return sequences
        count = length - self._prompt_length
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            **{name: _per_token(rows, count) for name, rows in self._outputs.items()},
            **{CACHE: cache},
            **outputs,
        )


def _per_token(rows: list[list[torch.Tensor]], count: int) -> tuple[torch.Tensor, ...]:
    """`count` tensors `[B, V]`; NaN for a row that stopped before: what plain generation has there costs forwards."""
    behind = torch.full_like(rows[0][0], torch.nan)
    return tuple(torch.stack([row[index] if index < len(row) else behind for row in rows]) for index in range(count))

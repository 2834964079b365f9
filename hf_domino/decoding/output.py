"""The committed tokens: where each sequence stops, what is streamed, and what `generate` returns.

Shapes: B sequences of the batch, R of them, T tokens so far, N new tokens, L length of a text, V vocabulary.
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
    """The tokens of a batch, which grow round by round and are cut exactly where plain `generate` would stop.

    Each sequence grows at its own pace. If there is an end-of-text token, a sequence that stops is done. Without one,
    plain `generate` continues all sequences until every one has stopped, and so does this class.

    Args:
        input_ids (`torch.Tensor`): Prompts `[B, T]`.
        stopping_criteria (`StoppingCriteriaList`): Called for every new prefix of every sequence, one sequence at a
            time. In a batch, criteria that Transformers does not define can compare sequences, so they are called for
            all sequences together, at each length that all of them have reached.
        generation_config (`GenerationConfig`): Provides the padding token and the requested outputs.
        streamer (`BaseStreamer`, *optional*): Receives each token once it is final, so no token is ever withdrawn.
        known ([`KnownStops`]): The stops of those criteria that need not be called.
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
        self._stops: list[int | None] = [None] * len(input_ids)  # length at which each sequence stopped
        self._prompt_length = self._streamed = input_ids.shape[1]
        self._values: list[list[int]] = [[] for _ in input_ids]  # the new tokens, on the host
        self._has_outputs = generation_config.return_dict_in_generate
        self._streamer = streamer
        self._pad = getattr(generation_config, "_pad_token_tensor", None)
        names: tuple[str, ...] = ()
        if generation_config.return_dict_in_generate:
            names = ("scores", "logits")
        # The requested outputs: a tensor [V] for each new token of each sequence.
        self._outputs: dict[str, list[list[torch.Tensor]]] = {
            name: [[] for _ in input_ids] for name in names if getattr(generation_config, f"output_{name}")
        }
        self._length_shown: int | None = None  # length of the text that a criterion or the streamer is looking at
        self._known = known
        self._criteria = StoppingCriteriaList()
        self._batch_criteria = StoppingCriteriaList()
        for criterion in stopping_criteria:
            if type(criterion) not in KNOWN_CRITERIA:
                is_by_row = len(input_ids) == 1 or type(criterion).__module__.startswith("transformers.")
                (self._criteria if is_by_row else self._batch_criteria).append(criterion)
        self._batch_length_checked = self._prompt_length  # length up to which the batch's criteria were called
        # Plain generation checks for the same attribute. Without it, it does not pad sequences that have stopped.
        self._pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)

    @property
    def unfinished(self) -> list[int]:
        """Indices of the sequences that still grow."""
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
        """How many new tokens `generate` returns for each sequence, not counting padding. All must have stopped."""
        final = self._final_length()
        return [min(length, final) - self._prompt_length for length in self._lengths]

    @property
    def num_steps(self) -> int:
        """How many steps plain generation would have made by now; it makes each step for all sequences together.

        If a criterion or the streamer raised an exception, the length of the text that it was looking at decides.
        """
        if self.unfinished:
            length = max(self._lengths)
        else:
            length = self._final_length()
        return (length if self._length_shown is None else self._length_shown) - self._prompt_length

    def num_new(self, rows: Sequence[int]) -> list[int]:
        """How many new tokens these sequences have so far."""
        return [self._lengths[row] - self._prompt_length for row in rows]

    def prefixes(self, rows: Sequence[int]) -> Prefixes:
        """The tokens so far of these sequences."""
        if len(rows) == len(self._lengths):
            ids = self._ids
        else:
            ids = self._ids[list(rows)]
        return Prefixes(ids, [self._lengths[row] for row in rows], list(rows))

    def tokens(self, row: int, start: int) -> list[int]:
        """The tokens of a sequence from index `start` on. Only tokens of the prompt must be copied from the device."""
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
        """Append new tokens to these sequences, each up to its first stop.

        Args:
            rows (`Sequence[int]`): Indices of R sequences of the batch.
            tokens (`torch.Tensor`): New tokens `[R, N]`.
            counts (`Sequence[int]`): How many of the N tokens are valid for each sequence, from the first on.
            logits (`torch.Tensor`): The target's logits that they were chosen from, `[R, N, V]` or more positions.
            scores (`torch.Tensor`): The logits after the processors.
            values (`Sequence[Sequence[int]]`, *optional*): The tokens on the host, if they are there already.

        Returns:
            `list[int]`: How many tokens each sequence kept.
        """
        needed = max(self._lengths) + tokens.shape[1]
        if needed > self._ids.shape[1]:  # the caller's prompt tensor is never written to
            grown = self._ids.new_zeros(len(self._lengths), max(2 * needed, 64))
            grown[:, : self._ids.shape[1]] = self._ids
            self._ids = grown
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
            except BaseException:  # stream the tokens before the failing one, as plain generation would have done
                self._cut(row, start if self._length_shown is None else self._length_shown - 1)
                self._stream()
                raise
            self._cut(row, start + kept[-1])
        while self._batch_criteria and self._batch_length_checked < self._num_settled:
            self._ask_of_batch()
        self._known.warn(self._ids[:1, : max(self._lengths)])
        if self._streamer is not None:
            self._stream()
        return kept

    def _cut(self, row: int, length: int) -> None:
        """Cut a sequence to this length."""
        self._lengths[row] = length
        kept: list[list[list[Any]]] = [self._values, *self._outputs.values()]
        for each in kept:
            del each[row][length - self._prompt_length :]

    @property
    def _num_settled(self) -> int:
        """The length that all sequences have reached, counting the padding of those that have ended."""
        growing = [self._lengths[row] for row in self.unfinished]
        return min(growing) if growing else self._final_length()

    def _ask_of_batch(self) -> None:
        """Call the batch's criteria at the next length. A sequence that ends there loses its tokens after it."""
        self._batch_length_checked += 1
        ends = self._ask(self._batch_criteria, self._padded(self._batch_length_checked), slice(None))
        for row, stop in enumerate(self._stops):
            if ends[row] and (stop is None or stop > self._batch_length_checked):
                self._stops[row] = self._batch_length_checked
                if self._pads_finished:
                    self._cut(row, self._batch_length_checked)

    def _ask(self, criteria: StoppingCriteriaList, ids: torch.Tensor, rows: slice) -> list[bool]:
        """Call criteria with texts `[R, L]` and the scores of these sequences; return which of the texts they end."""
        self._length_shown = ids.shape[1]
        scores = self._outputs.get("scores")
        count = self._length_shown - self._prompt_length
        ends = criteria(ids, None if scores is None else _per_token(scores[rows], count))
        self._length_shown = None
        return ends.flatten().tolist()

    def _keep(self, row: int, values: Sequence[int]) -> int:
        """How many of the new tokens stay: those up to the first stop, or all if plain generation would continue."""
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
        """Stream the tokens that are final in all sequences, one token of each at a time."""
        if self._streamer is None:
            return
        # The streamer gets one token of every sequence together, so a fast sequence waits for the others here.
        final = self._num_settled
        ids = self._padded(final)
        for position in range(self._streamed, final):
            self._length_shown = position + 1
            self._streamer.put(ids[:, position].cpu())
        self._length_shown = None
        self._streamed = max(final, self._streamed)

    def _final_length(self) -> int:
        if self._pads_finished:
            return max(self._lengths)
        return max(stop or 0 for stop in self._stops)

    def _padded(self, length: int) -> torch.Tensor:
        """The ids `[B, length]`, with padding after shorter sequences."""
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
            cache (`Cache`): The target's cache.
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
    """Stack the outputs of all sequences into `count` tensors `[B, V]`, with NaN after the end of a sequence."""
    # Plain generation has numbers there, but computing them would take further forwards.
    behind = torch.full_like(rows[0][0], torch.nan)
    return tuple(torch.stack([row[index] if index < len(row) else behind for row in rows]) for index in range(count))

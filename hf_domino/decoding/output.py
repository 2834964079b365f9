"""Committed tokens: where a generation must stop, what streams out, and what `generate` returns.

Shapes: B batch, T tokens so far, N new tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput


class CommittedSequence:
    """The tokens of one generation, grown a round at a time and cut exactly where plain `generate` would stop.

    Args:
        input_ids (`torch.Tensor`): Prompt `[1, T]`.
        stopping_criteria (`StoppingCriteriaList`): Asked about every new prefix, not only about a round's last.
        generation_config (`GenerationConfig`): For end-of-text ids, the length limit and the outputs wanted.
        streamer (`BaseStreamer`, *optional*): Receives each token once it is final, never one that is withdrawn.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self.ids = input_ids
        self.finished = False
        self._config, self._streamer = generation_config, streamer
        self._scores: list[torch.Tensor] = []
        self._logits: list[torch.Tensor] = []
        fast = (EosTokenCriteria, MaxLengthCriteria)
        self._criteria = StoppingCriteriaList(c for c in stopping_criteria if type(c) not in fast)
        self._eos = [c.eos_token_id.flatten().tolist() for c in stopping_criteria if type(c) is EosTokenCriteria]
        self._limits = [c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria]

    def commit(self, tokens: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor) -> int:
        """Append new tokens up to the first stop.

        Args:
            tokens (`torch.Tensor`): `[1, N]`.
            logits (`torch.Tensor`): The target's logits they were chosen from, `[1, N, V]` or more positions.
            scores (`torch.Tensor`): The same after processors.

        Returns:
            `int`: How many were kept.
        """
        values = tokens[0].tolist()
        kept = self._keep(values, tokens, scores)
        self.ids = torch.cat((self.ids, tokens[:, :kept]), dim=1)
        self._stream(values[:kept])
        self._scores += _per_token(scores, kept) if self._wants("output_scores") else []
        self._logits += _per_token(logits, kept) if self._wants("output_logits") else []
        return kept

    def _keep(self, values: list[int], tokens: torch.Tensor, scores: torch.Tensor) -> int:
        length = self.ids.shape[1]
        for count, value in enumerate(values, start=1):
            stop = any(value in ids for ids in self._eos) or any(length + count >= limit for limit in self._limits)
            if self._criteria:
                prefix = torch.cat((self.ids, tokens[:, :count]), dim=1)
                so_far = tuple(self._scores + _per_token(scores, count)) if self._wants("output_scores") else None
                stop = bool(self._criteria(prefix, so_far).all()) or stop
            if stop:
                self.finished = True
                return count
        return len(values)

    def _stream(self, values: list[int]) -> None:
        if self._streamer is not None:
            for value in values:
                self._streamer.put(torch.tensor([value]))

    def _wants(self, output: str) -> bool:
        return bool(self._config.return_dict_in_generate and getattr(self._config, output))

    def result(self, cache: Any) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """End the stream and return what `generate` returns."""
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=tuple(self._scores) if self._wants("output_scores") else None,
            logits=tuple(self._logits) if self._wants("output_logits") else None,
            past_key_values=cache,
        )


def _per_token(values: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [values[:, index] for index in range(count)]

"""A server with OpenAI's completions API as a writer: vLLM or SGLang, which serve a large target faster.

Prompts go there as token ids, so the chat template is applied here. Both servers return token ids on request; from one
that does not, only texts are taken that survive the way through the tokenizer and back.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_domino.data.writers import Sampling, Written

MAX_RETRIES = 5
KEY = "OPENAI_API_KEY"  # of the environment
UNTRUNCATED = {"top_k": -1, "min_p": 0.0}  # a server takes them from the generation configuration else


class EndpointWriter:
    """The target on a server.

    Args:
        url (`str`): Address of the API, such as `http://localhost:8000/v1`.
        model (`str`): The name it serves the target under.
        tokenizer (`PreTrainedTokenizerBase`): The target's.
        ends (`Sequence[int]`): Token ids that end a text of the target.

    Raises:
        ValueError: If the package `openai` is not installed.
    """

    def __init__(self, url: str, model: str, tokenizer: Any, ends: Sequence[int]):
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ValueError("an endpoint needs the package openai: pip install openai.") from error
        key = os.environ.get(KEY, "none")  # most servers of one's own ask for none, the client does
        self.client = OpenAI(base_url=url, api_key=key, max_retries=MAX_RETRIES)
        self.url, self.model, self.tokenizer, self.ends = url, model, tokenizer, tuple(ends)

    def write(self, prompts: list[list[int]], sampling: Sampling, seed: int) -> list[Written | None]:
        """Continue a batch of prompts, all at once, as [`TargetWriter`] does.

        Args:
            prompts (`list[list[int]]`): Token ids, none empty.
            sampling (`Sampling`): How.
            seed (`int`): Of the sampling. Equal prompts are continued differently.

        Returns:
            `list[Written]`: Per prompt what follows it; None for a text that the tokenizer does not return as it was.

        Raises:
            ConnectionError: If the server does not answer, or refuses a request.
        """
        from openai import OpenAIError

        seeds = [zlib.crc32(f"{seed} {row}".encode()) for row in range(len(prompts))]
        with ThreadPoolExecutor(len(prompts)) as pool:
            try:
                return list(pool.map(lambda prompt, own: self._write_one(prompt, sampling, own), prompts, seeds))
            except OpenAIError as error:
                hint = "Check --endpoint and --endpoint-model, and that the server is vLLM's or SGLang's."
                raise ConnectionError(f"the endpoint {self.url} with model {self.model!r}: {error} {hint}") from error

    def _write_one(self, prompt: list[int], sampling: Sampling, seed: int) -> Written | None:
        ends = sampling.ends or self.ends
        completion = self.client.completions.create(
            model=self.model,
            prompt=prompt,
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=seed,
            extra_body={**UNTRUNCATED, "return_token_ids": True, "stop_token_ids": list(ends)},
        )
        choice = completion.choices[0]
        ids = getattr(choice, "token_ids", None)  # beyond OpenAI's own fields
        if ids is None:
            ids = self._ids_of(choice.text)
        return None if ids is None else _with_end(list(ids), choice.finish_reason == "stop", ends)

    def _ids_of(self, text: str) -> list[int] | None:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids if self.tokenizer.decode(ids, skip_special_tokens=False) == text else None


def _with_end(ids: list[int], ended: bool, ends: Sequence[int]) -> Written:
    """A text with the token that ended it, which servers leave out of what they return."""
    if ended and ends and (not ids or ids[-1] not in ends):
        ids = [*ids, ends[0]]
    return Written(ids, ended)

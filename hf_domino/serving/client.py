"""Requests to a server, one by one or together, and what it counts meanwhile."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hf_domino.serving.server import MODEL

MOST_SECONDS = 600.0  # of one request
ROUNDS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GREEDY: Mapping[str, Any] = {"temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Answers:
    """What came of some requests.

    Args:
        texts (`list[list[int]]`): New token ids of each prompt.
        seconds (`float`): From the first request to the last answer.
        rounds (`int`): Rounds of all requests; 0 without a drafter.
        accepted (`tuple[int, ...]`): How often the proposal of each position was accepted.
    """

    texts: list[list[int]]
    seconds: float
    rounds: int
    accepted: tuple[int, ...]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests, the prompts' reading included in the time."""
        return sum(map(len, self.texts)) / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round brought, the bonus included; None without rounds."""
        return 1 + sum(self.accepted) / self.rounds if self.rounds else None


def ask(url: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int = 1, **sampling: Any) -> Answers:
    """Send prompts to a server.

    Args:
        url (`str`): The server's.
        prompts (`Sequence`): Token ids of each.
        max_new_tokens (`int`): Tokens of each answer.
        at_once (`int`, *optional*, defaults to 1): Requests that are open at the same time.
        sampling: How tokens are chosen, in the server's words; greedily and past the end of a text by default.

    Returns:
        [`Answers`]: In the order of the prompts.
    """
    before, start = counters(url), time.perf_counter()
    fields = {"model": MODEL, "max_tokens": max_new_tokens, "return_token_ids": True, **(sampling or GREEDY)}
    with ThreadPoolExecutor(at_once) as pool:
        texts = list(pool.map(lambda prompt: _complete(url, fields | {"prompt": list(prompt)}), prompts))
    seconds = time.perf_counter() - start
    after = counters(url)
    return Answers(texts, seconds, after[0] - before[0], _difference(after[1], before[1]))


def counters(url: str) -> tuple[int, tuple[int, ...]]:
    """Rounds, and accepted proposals of each position, since the server started."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=MOST_SECONDS) as answer:
        return read_counters(answer.read().decode())


def version(url: str) -> str:
    """The server's version of vLLM."""
    with urllib.request.urlopen(f"{url}/version", timeout=MOST_SECONDS) as answer:
        return json.load(answer)["version"]


def read_counters(page: str) -> tuple[int, tuple[int, ...]]:
    """Read [`counters`] from a page of metrics; zero and nothing where there is no drafter.

    Example:
    ```python
    >>> from hf_domino.serving.client import read_counters
    >>> read_counters('''
    ... vllm:spec_decode_num_drafts_total{engine="0"} 9.0
    ... vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
    ... vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0
    ... ''')
    (9, (5, 2))

    ```
    """
    rounds, accepted = 0, dict[int, int]()
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(ROUNDS + "{"):
            rounds += int(float(value))
        elif name.startswith(ACCEPTED + "{") and (position := re.search(r'position="(\d+)"', name)):
            accepted[int(position[1])] = accepted.get(int(position[1]), 0) + int(float(value))
    return rounds, tuple(accepted[position] for position in sorted(accepted))


def _difference(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count - (before[index] if index < len(before) else 0) for index, count in enumerate(after))


def _complete(url: str, fields: Mapping[str, Any]) -> list[int]:
    data, kind = json.dumps(fields).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/completions", data, kind), timeout=MOST_SECONDS
    ) as answer:
        return json.load(answer)["choices"][0]["token_ids"]

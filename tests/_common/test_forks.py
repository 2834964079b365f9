"""A process that is forked while another thread uses something shared goes on, and finds it whole."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch
from builders import build_drafter
from families import build
from torch import nn

import hf_domino
from hf_domino.integration import assisted_call, default_drafter
from hf_domino.targets import identity

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")

TOKENS = list(range(7, 37))
PROMPT = torch.tensor([TOKENS])
SECONDS = 60  # far longer than what the child does


class Gate:
    """Stops the thread that calls a function, until it is opened."""

    def __init__(self, function):
        self._function = function
        self._caller = threading.current_thread()
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, *args, **kwargs):
        if threading.current_thread() is not self._caller:
            self.reached.set()
            self.opened.wait(SECONDS)
        return self._function(*args, **kwargs)


def exit_code_of_a_child(run):
    """Fork, and return how the child ended; None if it had to be killed."""
    child = os.fork()
    if not child:
        try:
            run()
            os._exit(0)
        except BaseException:
            os._exit(1)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def packing(monkeypatch):
    monkeypatch.setenv("HF_DOMINO_PACKED", "1")
    layer = nn.Linear(48, 32)
    values = torch.ones(2, 48)

    def run():
        with torch.no_grad(), hf_domino.packed_linears(layer):
            packed = layer(values)
        with torch.no_grad():
            torch.testing.assert_close(packed, layer(values))

    run()
    hf_domino.release_workspaces()
    return run, torch.ops.mkldnn, "_reorder_linear_weight"


def remembering(monkeypatch):
    memory = hf_domino.LookupMemory(max_tokens=64)

    def run():
        memory.add(TOKENS)
        assert len(memory) == len(TOKENS)

    return run, memory.index, "add_many"


def naming(monkeypatch):
    target = build("qwen3")

    def run():
        assert assisted_call.named(target, "recycling").config.projector_type == "recycling"

    return run, assisted_call, "pipeline_drafter"


def identifying(monkeypatch):
    target = build("qwen3")

    def run():
        assert identity.identity_of(target) is identity.identity_of(target)

    return run, identity, "identify"


def meeting(monkeypatch):
    target = build("qwen3")
    drafter = build_drafter(target)
    functions = [lambda met: hf_domino.attach(met, drafter)]
    monkeypatch.setattr(default_drafter, "_on_first_call", functions)

    def run():
        target.generate(PROMPT, max_new_tokens=4, do_sample=False)
        assert hf_domino.attached(target).num_drafted == 1

    return run, functions, 0


@pytest.mark.parametrize("using", [packing, remembering, naming, identifying, meeting])
def test_a_fork_while_another_thread_is_using_it(using, monkeypatch):
    run, place, name = using(monkeypatch)
    if isinstance(place, list):
        gate = place[name] = Gate(place[name])
    else:
        gate = Gate(getattr(place, name))
        monkeypatch.setattr(place, name, gate)
    thread = threading.Thread(target=run)
    thread.start()
    assert gate.reached.wait(SECONDS)
    code = exit_code_of_a_child(run)
    gate.opened.set()
    thread.join()
    assert code == 0


def test_a_fork_of_the_thread_that_is_using_it():
    memory = hf_domino.LookupMemory(max_tokens=64)
    memory.add(TOKENS)

    def run():
        assert len(memory) == len(TOKENS)
        memory.add(TOKENS[5:])

    with memory.lock:
        code = exit_code_of_a_child(run)
    assert code == 0

"""A server's life: it is there inside the block, and nothing of it beyond, however the block ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_domino.serving import server as server_module
from hf_domino.serving.client import ask, read_counters, version
from hf_domino.serving.server import Server, reason_in

ROOT = Path(__file__).parents[2]
# Answers as vLLM does, with a process of its own beside it; both write their ids where the test looks.
PROGRAM = """
import http.server, json, os, subprocess, sys, time
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
stays = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", stays])
open(os.environ["IDS"], "w").write(f"{os.getpid()} {child.pid}")
rounds = 0

class Handler(http.server.BaseHTTPRequestHandler):
    def reply(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        metrics = f'vllm:spec_decode_num_drafts_total{{a="0"}} {rounds}.0'
        self.reply('{"version": "0.1"}' if self.path == "/version" else metrics)

    def do_POST(self):
        global rounds
        rounds += 2
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(float(os.environ.get("DELAY", "0")))
        self.reply(json.dumps({"choices": [{"token_ids": fields["prompt"][-1:] * fields["max_tokens"]}]}))

    def log_message(self, *arguments):
        pass

if os.environ.get("FAILS"):
    raise ValueError("num_speculative_tokens must be in [1, 7], got 9. A block has less.")
http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""
# A shell starts what it puts into the background without Ctrl-C, and its children inherit that.
MEASURES = """
import signal, sys
from pathlib import Path
from hf_domino.serving import server
from hf_domino.serving.client import ask
server.MODULE, server.PATIENCE = "program", 1
signal.signal(signal.SIGINT, signal.default_int_handler)
with server.Server(sys.executable, "anything", [], Path(sys.argv[1])) as running:
    print("there", flush=True)
    ask(running.url, [[1]], 2)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The folder of a program in the place of vLLM's."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("IDS", str(tmp_path / "ids"))
    monkeypatch.setattr(server_module, "MODULE", "program")
    monkeypatch.setattr(server_module, "PATIENCE", 1)
    return tmp_path


def processes(folder):
    return [int(number) for number in (folder / "ids").read_text().split()]


def is_running(number):
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # ended, and nobody has asked how


def all_gone(numbers, seconds=30):
    deadline = time.monotonic() + seconds
    while any(map(is_running, numbers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(is_running, numbers))


def test_requests_are_answered_and_rounds_counted(program):
    with Server(sys.executable, "anything", [], program / "log") as server:
        numbers = processes(program)
        assert all(map(is_running, numbers))
        found = ask(server.url, [[1, 2], [3], [4, 5, 6]], 3, at_once=2)
        assert version(server.url) == "0.1"
    assert found.texts == [[2, 2, 2], [3, 3, 3], [6, 6, 6]]
    assert (found.rounds, found.accepted) == (6, ())
    assert all_gone(numbers)


def test_an_error_inside_the_block_leaves_nothing(program):
    with pytest.raises(KeyError), Server(sys.executable, "anything", [], program / "log"):
        raise KeyError
    assert all_gone(processes(program))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_kill_in_a_request_leaves_nothing(program, monkeypatch, number):
    monkeypatch.setenv("DELAY", "600")
    measures = subprocess.Popen(
        [sys.executable, "-c", MEASURES, str(program / "log")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert measures.stdout.readline() == b"there\n"
    numbers = processes(program)
    assert all(map(is_running, numbers))
    measures.send_signal(number)
    measures.wait(60)
    assert all_gone(numbers)


def test_why_a_server_did_not_start_is_said(program, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    message = r"did not start: ValueError: num_speculative_tokens must be in \[1, 7\], got 9\. A block has less\."
    with pytest.raises(ChildProcessError, match=message), Server(sys.executable, "x", [], program / "log"):
        pass
    assert all_gone(processes(program))


def test_the_reason_is_the_first_error():
    log = (
        "INFO starts\n(Worker pid=7) ERROR 11-23 [core.py:1] ValueError: block_size must be 1.\nRuntimeError: failed.\n"
    )
    assert reason_in(log) == "ValueError: block_size must be 1."
    assert reason_in("one\ntwo\n\n") == "two"


def test_a_page_without_a_drafter():
    assert read_counters("# HELP\nprocess_start_time_seconds 1.7\n") == (0, ())

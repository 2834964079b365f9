"""A server's life: it is there inside the block, and nothing of it beyond, however the block ends."""

import sys
import time
from pathlib import Path

import pytest
import vllm_server
from vllm_server import ask, read_counters, serve

# Answers as vLLM does, with a process of its own beside it; both write their ids where the test looks.
PROGRAM = """
import http.server, json, os, subprocess, sys
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
        metrics = f'vllm:spec_decode_num_drafts_total{{a="0"}} {rounds}.0\\n'
        for position, count in enumerate((rounds // 2, 0)):
            metrics += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{a="0",position="{position}"}} {count}.0\\n'
        self.reply('{"version": "0.1"}' if self.path == "/version" else metrics)

    def do_POST(self):
        global rounds
        rounds += 2
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.reply(json.dumps({"choices": [{"token_ids": fields["prompt"][-1:] * fields["max_tokens"]}]}))

    def log_message(self, *arguments):
        pass

if os.environ.get("FAILS"):
    raise ValueError("num_speculative_tokens must be in [1, 7], got 9. A block has less.")
http.server.ThreadingHTTPServer(("127.0.0.1", int(flags["--port"])), Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The folder of a program in the place of vLLM's."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("IDS", str(tmp_path / "ids"))
    monkeypatch.setattr(vllm_server, "MODULE", "program")
    monkeypatch.setattr(vllm_server, "PATIENCE", 1)
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
    with serve(sys.executable, "anything", [], program / "log") as url:
        numbers = processes(program)
        assert all(map(is_running, numbers))
        found = ask(url, [[1, 2], [3], [4, 5, 6]], 3, at_once=2)
    assert (found.name, found.texts) == ("vLLM 0.1", [[2, 2, 2], [3, 3, 3], [6, 6, 6]])
    assert (found.rounds, found.accepted) == (6, [3, 0])
    assert all_gone(numbers)


def test_an_error_inside_the_block_leaves_nothing(program):
    with pytest.raises(KeyError), serve(sys.executable, "anything", [], program / "log"):
        raise KeyError
    assert all_gone(processes(program))


def test_why_a_server_did_not_start_is_said(program, monkeypatch):
    monkeypatch.setenv("FAILS", "1")
    message = r"did not start: ValueError: num_speculative_tokens must be in \[1, 7\], got 9\. A block has less\."
    with pytest.raises(ChildProcessError, match=message), serve(sys.executable, "x", [], program / "log"):
        pass
    assert all_gone(processes(program))


def test_counters_of_engines_are_added():
    lines = [
        *(f'vllm:spec_decode_num_drafts_total{{engine="{engine}"}} 9.0' for engine in (0, 1)),
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0',
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 5.0',
    ]
    assert read_counters("\n".join(lines)) == {0: 18, 1: 5, 2: 2}
    assert read_counters("# HELP\nprocess_start_time_seconds 1.7\n") == {}

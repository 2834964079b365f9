"""A server as a writer, against one of our own on the loopback."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from builders import EOS
from chats import read_lines, write_lines
from transformers import AutoTokenizer

from hf_domino.cli.main import main
from hf_domino.data.writers import EndpointWriter, Sampling, Written

pytestmark = pytest.mark.transformers

pytest.importorskip("openai")
HI = [11, 12]  # "hi" in the tiny vocabulary


class Server(ThreadingHTTPServer):
    """Answers completions with what `choice` makes of the last token of a prompt, and notes the requests."""

    def __init__(self, choice):
        self.requests, self.choice = [], choice
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, request))
        choice = self.server.choice(request["prompt"][-1])
        body = {"choices": [{"index": 0, **choice}]} if choice else {"error": {"message": "no such model"}}
        self.send_response(200 if choice else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def serve():
    """A function that starts a server."""
    servers = []

    def start(choice):
        servers.append(Server(choice))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_token_ids_are_taken_as_they_are(serve):
    choices = {
        5: {"text": "?", "finish_reason": "stop", "token_ids": [*HI, EOS]},
        6: {"text": "?", "finish_reason": "stop", "token_ids": HI},  # without the token that ended it
        7: {"text": "?", "finish_reason": "length", "token_ids": HI},
    }
    server, ended = serve(choices.get), Written([*HI, EOS], True)
    writer = EndpointWriter(server.url, "served", [EOS])
    written = writer.write([[4, last] for last in choices], Sampling(9, 0.7), seed=3)
    assert written == [ended, ended, Written(HI, False)]
    paths, requests = zip(*server.requests, strict=True)
    assert set(paths) == {"/v1/completions"}
    assert len({request["seed"] for request in requests}) == 3
    expected = {"model": "served", "max_tokens": 9, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    expected |= {"return_token_ids": True, "stop_token_ids": [EOS]}
    assert all(request.items() >= expected.items() for request in requests)


@pytest.mark.parametrize(
    ("field", "said", "end"), [("stop_reason", 3, 3), ("matched_stop", 2, 2), ("stop_reason", None, EOS)]
)
def test_a_text_ends_with_the_token_that_ended_it(field, said, end, serve):
    """As with Llama 3.1, which has three: the server says which one it was, or nothing if it was the tokenizer's."""
    server = serve(lambda _: {"text": "?", "finish_reason": "stop", "token_ids": HI, field: said})
    (written,) = EndpointWriter(server.url, "served", [EOS, 2, 3]).write([[4]], Sampling(9, 0.7), seed=3)
    assert written == Written([*HI, end], True)


def test_the_command_writes_by_an_endpoint(serve, saved_pair, tmp_path, capsys):
    choices = {
        "e": {"text": "", "finish_reason": "stop", "token_ids": HI},
        "x": {"text": "hi", "finish_reason": "stop"},
    }
    tokenizer = AutoTokenizer.from_pretrained(saved_pair[0])
    server = serve(lambda last: choices.get(tokenizer.decode([last])))
    prompts = write_lines(tmp_path / "prompts.jsonl", [{"text": "one"}])
    call = ["data", "--target", str(saved_pair[0]), "--endpoint", server.url, "--endpoint-model", "m"]
    call += ["--prompts", str(prompts), "--max-new-tokens", "16", "--max-prompt-tokens", "16"]
    assert main([*call, "--output", str(tmp_path / "data")]) == 0
    (row,) = read_lines(tmp_path / "data/train.jsonl")
    assert (row["completion"], row["input_ids"][-3:], sum(row["loss_mask"])) == ("hi", [*HI, EOS], 3)
    target = tmp_path / "target"  # without a generation configuration, and with another end in config.json
    shutil.copytree(saved_pair[0], target, ignore=shutil.ignore_patterns("generation_config.json"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"eos_token_id": [HI[-1], EOS]}))
    assert main([*call, "--target", str(target), "--output", str(tmp_path / "other")]) == 0
    (row,) = read_lines(tmp_path / "other/train.jsonl")
    assert (row["input_ids"][-2:], sum(row["loss_mask"])) == (HI, 2)
    config["eos_token_id"] = [HI[0] + 9, EOS]  # the first is not the tokenizer's, with which the server ended the text
    (target / "config.json").write_text(json.dumps(config))
    assert main([*call, "--target", str(target), "--output", str(tmp_path / "third")]) == 0
    (row,) = read_lines(tmp_path / "third/train.jsonl")
    assert row["input_ids"][-3:] == [*HI, EOS]
    for text, reason in (("y", "no such model"), ("x", "token_ids")):
        write_lines(prompts, [{"text": text}])
        assert main([*call, "--output", str(tmp_path / reason)]) == 2
        said = capsys.readouterr().err
        assert all(part in said for part in (server.url, "'m'", reason, "Check --endpoint and --endpoint-model"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://localhost:8000/v1", None),
        ("http://127.0.0.1:8000/v1", None),
        ("https://gpu.example/v1", "the key in OPENAI_API_KEY is sent to gpu.example"),
        (
            "http://gpu.example:8000/v1",
            "--endpoint with OPENAI_API_KEY must be https, or on this machine, got 'http://gpu",
        ),
    ],
)
def test_a_key_is_not_sent_unencrypted_and_its_receiver_is_said(url, said, monkeypatch, caplog):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    EndpointWriter(url, "model", [EOS])
    assert "OPENAI_API_KEY" not in caplog.text
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    if said and said.startswith("--endpoint"):
        with pytest.raises(ValueError, match=said):
            EndpointWriter(url, "model", [EOS])
    else:
        EndpointWriter(url, "model", [EOS])
        assert (said or "") in caplog.text
        assert ("OPENAI_API_KEY" in caplog.text) == (said is not None)
    assert "sk-secret" not in caplog.text

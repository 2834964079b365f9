"""A server as a writer, against one of our own on the loopback."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from builders import EOS
from chats import chat_tokenizer, read_lines

from hf_domino.data.settings import WritingSettings
from hf_domino.data.writers import EndpointWriter, Sampling, Written
from hf_domino.data.writing import write_data

pytest.importorskip("openai")
HI = [11, 12]  # "hi" in the tiny vocabulary


class Server(ThreadingHTTPServer):
    """Answers completions with what `choice` makes of the request, and notes the requests."""

    def __init__(self, choice):
        self.requests, self.choice = [], choice
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, request))
        choice = self.server.choice(request)
        status, body = (404, {"error": {"message": "no such model"}}) if choice is None else (200, self._body(choice))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _body(self, choice):
        common = {"index": 0, "logprobs": None}
        return {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [common | choice]}

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


def writer_for(server, tokenizer):
    return EndpointWriter(server.url, "served", tokenizer, [EOS])


def test_token_ids_are_taken_as_they_are(serve, tiny_tokenizer):
    choices = {
        5: {"text": "?", "finish_reason": "stop", "token_ids": [*HI, EOS]},
        6: {"text": "?", "finish_reason": "stop", "token_ids": HI},  # without the token that ended it
        7: {"text": "?", "finish_reason": "length", "token_ids": HI},
    }
    server = serve(lambda request: choices[request["prompt"][-1]])
    written = writer_for(server, tiny_tokenizer).write([[4, 5], [4, 6], [4, 7]], Sampling(9, 0.7), seed=3)
    assert written == [Written([*HI, EOS], True), Written([*HI, EOS], True), Written(HI, False)]
    paths, requests = zip(*server.requests, strict=True)
    assert set(paths) == {"/v1/completions"}
    assert len({request["seed"] for request in requests}) == 3
    expected = {"model": "served", "max_tokens": 9, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    expected |= {"return_token_ids": True, "stop_token_ids": [EOS]}
    assert all(request.items() >= expected.items() for request in requests)


def test_texts_that_do_not_round_trip_are_dropped(serve, tiny_tokenizer):
    texts = {5: "hi", 6: "h!"}  # of which the tiny vocabulary has no second character
    server = serve(lambda request: {"text": texts[request["prompt"][-1]], "finish_reason": "stop"})
    written = writer_for(server, tiny_tokenizer).write([[5], [6]], Sampling(9, 0.0), seed=0)
    assert written == [Written([*HI, EOS], True), None]


def test_what_the_server_refuses_is_said(serve, tiny_tokenizer):
    server = serve(lambda request: None)
    with pytest.raises(ConnectionError, match=r"endpoint http://127.* with model 'served': .*no such model.*Check"):
        writer_for(server, tiny_tokenizer).write([[5]], Sampling(9, 0.0), seed=0)


def test_data_from_an_endpoint(serve, tiny_tokenizer, tmp_path):
    def choice(request):
        if request["seed"] % 3 == 0:
            return {"text": "h!", "finish_reason": "stop"}
        ids = [4 + (request["seed"] >> shift) % 50 for shift in range(0, 30, 3)]
        return {"text": "", "finish_reason": "stop", "token_ids": ids}

    tokenizer = chat_tokenizer(tiny_tokenizer)
    writer = writer_for(serve(choice), tokenizer)
    settings = WritingSettings(rows=6, batch_size=4, max_new_tokens=16, max_prompt_tokens=16, min_distinct=0.0)
    report = write_data(writer, tokenizer, [EOS], tmp_path / "data", settings, progress=False)
    assert report["answers"]["kept"] + report["answers"]["dropped"].get("no round trip", 0) == 6
    assert (
        report["prompts"]["dropped"].get("no round trip", 0) + report["answers"]["dropped"].get("no round trip", 0) > 0
    )
    for row in read_lines(tmp_path / "data/train.jsonl"):
        assert row["input_ids"][-1] == EOS
        assert sum(row["loss_mask"]) == 11

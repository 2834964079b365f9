"""A data set by its name on the Hub: one that answers on this machine stands in for it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

COMMIT = "a" * 40
CONFIGS = [{"config_name": name, "data_files": f"{name}/*.jsonl"} for name in ("chat", "code")]
FILES = {
    "README.md": f"---\nconfigs: {json.dumps(CONFIGS)}\n---\n".encode(),
    "chat/train.jsonl": b"".join(b'{"input_ids": [4, 5, %d]}\n' % token for token in range(20)),
    "code/train.jsonl": b'{"input_ids": [7, 8]}\n',
}
READ = """
from hf_domino.data.rows import load_rows
from hf_domino.data.records import from_dataset
print(load_rows(from_dataset("me/texts:chat")).counts.rows)
print(load_rows(from_dataset("me/texts:code", streaming=True), max_rows=3)[0]["input_ids"])
for name in ("me/texts", "me/texts:none", "me/none"):
    try:
        from_dataset(name)
    except ValueError as error:
        print(error.args)
"""
OFFLINE = "\n".join(READ.splitlines()[:4])  # what was read before


class FakeHub(BaseHTTPRequestHandler):
    """The part of the Hub's interface that reading one data set asks for."""

    def do_GET(self):
        """Answer what is asked for, or that there is no such thing."""
        path = self.path.partition("?")[0]
        if path.startswith("/datasets/me/texts/resolve/"):
            name = path.split("/", 6)[6]
            digest = hashlib.sha1(name.encode()).hexdigest()
            return self.answer(FILES.get(name), {"ETag": f'"{digest}"'})
        if path.startswith("/api/datasets/me/texts/tree/"):
            folder = path.removeprefix(f"/api/datasets/me/texts/tree/{COMMIT}").strip("/")
            listed = [name for name in FILES if name.rpartition("/")[0] == folder]
            entries = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "b" * 40} for name in listed]
            folders = [] if folder else ["chat", "code"]
            entries += [{"type": "directory", "path": name, "size": 0, "oid": "c" * 40} for name in folders]
            return self.answer(json.dumps(entries).encode())
        if path.startswith("/api/datasets/me/texts"):
            about = {"id": "me/texts", "sha": COMMIT, "private": False, "siblings": [{"rfilename": n} for n in FILES]}
            return self.answer(json.dumps(about).encode())
        return self.answer(None)

    do_HEAD = do_GET

    def answer(self, body, headers=None):
        """Send a body, or that there is none."""
        self.send_response(404 if body is None else 200)
        missing = "EntryNotFound" if "/me/texts" in self.path else "RepoNotFound"
        told = {"X-Error-Code": missing} if body is None else headers or {}
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body or b"")), **told}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and body:
            self.wfile.write(body)

    def log_message(self, *args):
        """Say nothing."""


@pytest.fixture
def run(tmp_path):
    """A function that runs a script in a process of its own, for which the Hub is here."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1"}
    folders = {"HF_HOME": str(tmp_path), "HF_DATASETS_CACHE": str(tmp_path / "datasets")}

    def run_script(script, **more):
        environment = {**os.environ, **hub, **folders, **more}
        return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)

    yield run_script
    server.shutdown()


@pytest.mark.slow
def test_a_data_set_of_the_hub(run):
    done = run(READ)
    *read, ambiguous, unknown, missing = done.stdout.splitlines()
    assert read == ["20", "[7, 8]"], done.stderr
    assert "me/texts'. datasets says: Config name is missing" in ambiguous
    assert "me/texts:none'. datasets says: BuilderConfig 'none' not found" in unknown
    assert "me/none'. datasets says: Dataset 'me/none' doesn't exist on the Hub" in missing
    offline = run(OFFLINE, HF_HUB_OFFLINE="1")
    assert offline.stdout.splitlines() == ["20"], offline.stderr

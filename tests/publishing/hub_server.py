"""A Hub on the loopback interface: as much of its protocol as huggingface_hub's client speaks to push, load and find.

Run the client with `HF_ENDPOINT=server.url` and `HF_HUB_DISABLE_XET=1`, both set before it is imported.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

from hub_repos import Repo, is_large, oid_of

TOKEN = "hf_" + "WriterWriterWriterWriterWriter0123"
READER = "hf_" + "ReaderReaderReaderReaderReader0123"  # may only propose
NAME = r"([^/]+/[^/]+?)"
ROUTES: list[tuple[str, str, Callable]] = []


class HubServer(ThreadingHTTPServer):
    """The server with all it holds, to be looked at and tampered with by tests."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # large files by SHA-256
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, token
        self.received: list[str] = []  # large files that were sent whole
        self.outages: list[int] = []  # of each coming upload, after how many large files the connection breaks
        self.lock, self.puts_left = threading.Lock(), None
        self.damage: dict[str, str] = {}  # repository -> how its large files arrive: "short", "broken" or "garbled"

    def add(self, name: str, files: dict[str, bytes], **fields) -> str:
        """A repository that is there from the start; returns its commit."""
        repo = self.repos[name] = Repo(**fields)
        self.objects.update({oid_of(path, content): content for path, content in files.items() if is_large(path)})
        return repo.commit(files)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.message = status, message
        self.headers = {"X-Error-Code": code, "X-Error-Message": message}


def route(methods: str, path: str):
    """Have a method of the handler answer requests; groups of the path are its arguments."""
    return lambda method: ROUTES.append((methods, path, method)) or method


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: HubServer

    log_message = lambda *_: None  # noqa: E731

    def handle_request(self):
        """Find the route and answer; what a route returns is sent as JSON."""
        url = urlsplit(self.path)
        self.query, self.length = parse_qs(url.query), int(self.headers.get("Content-Length", 0))
        self.token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        self.server.requests.append((self.command, self.path, self.token))
        try:
            if self.token not in (None, TOKEN, READER):
                raise Refused(401, "", "Invalid credentials in Authorization header")
            for methods, path, method in ROUTES:
                if self.command in methods.split() and (found := re.fullmatch(path, url.path)):
                    answer = method(self, *map(unquote, found.groups()))
                    return None if answer is None else self.answer(200, answer)
            raise Refused(404, "", f"there is no {url.path}")
        except Refused as refused:
            self.rfile.read(self.length)
            self.answer(refused.status, {"error": refused.message}, {k: v for k, v in refused.headers.items() if v})

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def answer(self, status: int, content, headers=(), length: int | None = None):
        """Send JSON, or bytes; `length` is what the headers claim."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": len(body) if length is None else length, **dict(headers)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read(self) -> bytes:
        """The request's body."""
        body, self.length = self.rfile.read(self.length), 0
        return body

    def check_writer(self):
        """Refuse who may not write."""
        if self.token != TOKEN:
            raise Refused(403, "", "You don't have the required permissions") if self.token else Refused(401)

    def repo(self, name: str, revision: str | None = None) -> tuple[Repo, str]:
        """A repository and a commit, for who may see it."""
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and self.token != TOKEN):
            raise Refused(404 if self.token else 401, "RepoNotFound", "Repository not found")
        commit = repo.branches.get(revision or "main", revision)
        if commit not in repo.trees:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    @route("POST", "/api/repos/create")
    def create_repo(self):
        self.check_writer()
        asked = json.loads(self.read())
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.server.repos:
            return self.answer(409, {"url": f"{self.server.url}/{name}"})
        self.server.add(name, {".gitattributes": b""}, private=asked.get("visibility") == "private")
        return {"url": f"{self.server.url}/{name}"}

    @route("POST", "/api/validate-yaml")
    def validate_card(self):
        self.read()
        return {"errors": [], "warnings": []}

    @route("GET", "/api/models")
    def list_models(self):
        wanted, word = set(self.query.get("filter", ())), self.query.get("search", [""])[0].lower()
        public = {name: repo for name, repo in self.server.repos.items() if not repo.private}
        return [self.model_info(n) for n, repo in public.items() if wanted <= repo.tags() and word in n.lower()]

    @route("GET", f"/api/models/{NAME}")
    @route("GET", f"/api/models/{NAME}/revision/([^/]+)")
    def model_info(self, name: str, revision: str | None = None):
        repo, commit = self.repo(name, revision)
        files = [{"rfilename": path} for path in repo.trees[commit]]
        details = {"id": name, "sha": commit, "private": repo.private, "gated": "manual" if repo.gated else False}
        return details | {"downloads": repo.downloads, "lastModified": "2026-01-02T03:04:05.000Z", "siblings": files}

    @route("POST", f"/api/models/{NAME}/preupload/([^/]+)")
    def say_how_to_upload(self, name: str, revision: str):
        self.repo(name, revision)
        self.check_writer()
        paths = [file["path"] for file in json.loads(self.read())["files"]]
        modes = {path: "lfs" if is_large(path) else "regular" for path in paths}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    @route("POST", rf"/{NAME}\.git/info/lfs/objects/batch")
    def say_where_to_upload(self, name: str):
        asked = json.loads(self.read())["objects"]
        self.server.puts_left = self.server.outages.pop(0) if self.server.outages else None
        for large in asked:
            if large["oid"] not in self.server.objects:
                places = {"upload": "store", "verify": "verify"}
                large["actions"] = {k: {"href": f"{self.server.url}/{v}/{large['oid']}"} for k, v in places.items()}
        return {"transfer": "basic", "objects": asked}

    @route("PUT", r"/store/(\w+)")
    def receive(self, oid: str):
        with self.server.lock:
            left = self.server.puts_left
            self.server.puts_left = left and left - 1
        if left == 0:
            self.rfile.read(self.length // 2)
            self.close_connection = True
            return self.connection.shutdown(2)
        content = self.read()
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        self.server.received.append(oid)
        return {}

    @route("POST", r"/verify/(\w+)")
    def verify(self, oid: str):
        assert len(self.server.objects[oid]) == json.loads(self.read())["size"]
        return {}

    @route("POST", f"/api/models/{NAME}/commit/([^/]+)")
    def commit(self, name: str, revision: str):
        repo, head = self.repo(name, revision)
        (_, header), *lines = [json.loads(line).values() for line in self.read().splitlines()]
        if header.get("parentCommit", head) != head:
            raise Refused(412, "", "A commit has happened since.")
        self.check_writer()
        changes = {v["path"]: base64.b64decode(v["content"]) for kind, v in lines if kind == "file"}
        changes |= {v["path"]: self.server.objects[v["oid"]] for kind, v in lines if kind == "lfsFile"}
        commit = repo.commit(changes)
        return {"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit}

    @route("GET HEAD", f"/{NAME}/resolve/([^/]+)/(.+)")
    def resolve(self, name: str, revision: str, path: str):
        repo, commit = self.repo(name, revision)
        if repo.gone:
            raise Refused(404 if self.token else 401, "RepoNotFound", "Repository not found")
        if repo.gated:
            raise Refused(403 if self.token else 401, "GatedRepo", "Access is restricted")
        content, headers = repo.trees[commit].get(path), {"X-Repo-Commit": commit}
        if content is None:
            return self.answer(404, b"", headers | {"X-Error-Code": "EntryNotFound"})
        headers["ETag"] = f'"{oid_of(path, content)}"'
        how = self.server.damage.get(name) if is_large(path) and self.command == "GET" else None
        half = content[: len(content) // 2]
        self.close_connection = how == "broken"
        length = len(content) if how == "broken" else None
        content = {"short": half, "broken": half, "garbled": bytes(len(content))}.get(how, content)
        return self.answer(200, content, headers, length)

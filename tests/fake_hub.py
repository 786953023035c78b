"""A Hub for tests, in memory: what the real `huggingface_hub` client asks for when models are pushed and pulled.

Private repositories want the token `TOKEN`; without it they do not seem to exist, as on the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_test"
_LFS_ENDINGS = (".safetensors", ".bin", ".pt")


@dataclass
class Commit:
    sha: str
    files: dict[str, bytes]


@dataclass
class Repository:
    private: bool
    commits: list[Commit] = field(default_factory=list)

    def at(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit.sha == revision), None)


class FakeHub(ThreadingHTTPServer):
    """Serves on a free port of this machine while it is used as a context."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> FakeHub:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self.server_close()

    def put(self, name: str, files: dict[str, bytes], private: bool = False) -> str:
        """Commit files to a repository, past the client. Returns the commit's hash."""
        repository = self.repositories.setdefault(name, Repository(private))
        before = repository.commits[-1].files if repository.commits else {}
        sha = hashlib.sha1(f"{name}{len(repository.commits)}".encode()).hexdigest()
        repository.commits.append(Commit(sha, {**before, **files}))
        return sha


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        path, body = unquote(parts.path), self._body()
        self.server.asked.append(f"{self.command} {path}")
        for pattern, answer in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match is not None:
                return answer(self, *match.groups(), body)
        return self._error(404, "NotFound")

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, status: int, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **named}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _error(self, status: int, code: str, **headers: str) -> None:
        self._answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code, **headers)

    @property
    def _signed_in(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str) -> Repository | None:
        """The repository, if there is one and the client may see it; otherwise the refusal has been sent."""
        repository = self.server.repositories.get(name)
        if repository is None or (repository.private and not self._signed_in):
            self._error(404 if self._signed_in else 401, "RepoNotFound")
            return None
        return repository

    # ---------------------------------------------------------------- what is asked for

    def who_am_i(self, body: bytes) -> None:
        if not self._signed_in:
            return self._error(401, "Unauthorized")
        token = {"accessToken": {"role": "write", "displayName": "test"}}
        return self._answer(200, {"name": "me", "type": "user", "orgs": [], "auth": token})

    def validate_card(self, body: bytes) -> None:
        self._answer(200, {"errors": [], "warnings": []})

    def create(self, body: bytes) -> None:
        if not self._signed_in:
            return self._error(401, "Unauthorized")
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = f"{self.server.url}/{name}"
        if name in self.server.repositories:
            return self._answer(409, {"error": "exists", "url": url})
        self.server.repositories[name] = Repository(
            private=asked.get("visibility") == "private" or bool(asked.get("private"))
        )
        self.server.put(name, {".gitattributes": b""})
        return self._answer(200, {"url": url, "name": name, "id": name})

    def how_to_upload(self, name: str, body: bytes) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(_LFS_ENDINGS) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    def where_to_upload(self, name: str, body: bytes) -> None:
        def actions(oid: str) -> dict[str, Any]:
            if oid in self.server.objects:
                return {}
            return {"actions": {"upload": {"href": f"{self.server.url}/_lfs/{oid}", "header": {}}}}

        objects = [
            {"oid": one["oid"], "size": one["size"], "authenticated": True, **actions(one["oid"])}
            for one in json.loads(body)["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def upload(self, oid: str, body: bytes) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.objects[oid] = body
        self._answer(200)

    def commit(self, name: str, body: bytes) -> None:
        repository = self._repository(name)
        if repository is None:
            return None
        if not self._signed_in:
            return self._error(401, "Unauthorized")
        files: dict[str, bytes] = {}
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        sha = self.server.put(name, files)
        url = f"{self.server.url}/{name}/commit/{sha}"
        return self._answer(200, {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""})

    def refs(self, name: str, body: bytes) -> None:
        repository = self._repository(name)
        if repository is None:
            return None
        main = {"name": "main", "ref": "refs/heads/main", "targetCommit": repository.commits[-1].sha}
        return self._answer(200, {"branches": [main], "tags": [], "converts": []})

    def info(self, name: str, revision: str | None, body: bytes) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return None
        siblings = [{"rfilename": file, "size": len(data)} for file, data in commit.files.items()]
        about = {"id": name, "modelId": name, "sha": commit.sha, "private": False, "tags": [], "siblings": siblings}
        return self._answer(200, about)

    def tree(self, name: str, revision: str, body: bytes) -> None:
        commit = self._commit(name, revision)
        if commit is not None:
            self._answer(200, [_listed(path, data) for path, data in commit.files.items()])

    def paths_info(self, name: str, revision: str, body: bytes) -> None:
        commit = self._commit(name, revision)
        if commit is not None:
            asked = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode()).get("paths", [])
            self._answer(200, [_listed(path, commit.files[path]) for path in asked if path in commit.files])

    def resolve(self, name: str, revision: str, path: str, body: bytes) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return None
        if path not in commit.files:
            return self._error(404, "EntryNotFound", X_Repo_Commit=commit.sha)
        data = commit.files[path]
        return self._answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit.sha)

    def _commit(self, name: str, revision: str | None) -> Commit | None:
        repository = self._repository(name)
        if repository is None:
            return None
        commit = repository.at(revision or "main")
        if commit is None:
            self._error(404, "RevisionNotFound")
        return commit


def _listed(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "oid": hashlib.sha1(data).hexdigest(), "size": len(data), "path": path}


_NAME = r"([^/]+/[^/]+)"
_ROUTES: list[tuple[str, Callable[..., None]]] = [
    ("/api/whoami-v2", _Handler.who_am_i),
    ("/api/validate-yaml", _Handler.validate_card),
    ("/api/repos/create", _Handler.create),
    (rf"/api/models/{_NAME}/preupload/main", _Handler.how_to_upload),
    (rf"/api/models/{_NAME}/commit/main", _Handler.commit),
    (rf"/api/models/{_NAME}/refs", _Handler.refs),
    (rf"/api/models/{_NAME}(?:/revision/([^/]+))?", _Handler.info),
    (rf"/api/models/{_NAME}/tree/([^/]+)", _Handler.tree),
    (rf"/api/models/{_NAME}/paths-info/([^/]+)", _Handler.paths_info),
    (rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.where_to_upload),
    (r"/_lfs/([0-9a-f]{64})", _Handler.upload),
    (rf"/{_NAME}/resolve/([^/]+)/(.+)", _Handler.resolve),
]

"""A hub on this machine: repositories that take what huggingface_hub pushes, by the hub's own protocol.

Small files come inside the commit, large ones are put to an address that the Git LFS batch names, and joined to the
commit by their SHA-256, which is compared.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

REGULAR_NBYTES = 20_000
"""Of the largest file that comes inside a commit; what the hub has is of the same kind, and larger."""


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """refuses: paths, as a pattern, that are answered with 403. token: the only one that may write."""

    token: str
    address: str = ""
    refuses: str = r"(?!)"
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)


class Answer(NamedTuple):
    status: int
    content: dict[str, object]


@contextmanager
def running(token: str) -> Iterator[Hub]:
    hub = Hub(token)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.asked.append(f"{self.command} {self.path}")
            may = self.path.startswith("/objects/") or self.headers.get("Authorization") == f"Bearer {hub.token}"
            if not may or re.search(hub.refuses, self.path):
                found = Answer(403 if may else 401, {"error": "You may not write to somebody"})
            else:
                found = _answer(hub, self.command, self.path, body)
            text = json.dumps(found.content).encode()
            self.send_response(found.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = answer  # noqa: N815 the names that the standard library asks for

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="local-hub")
    thread.start()
    hub.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(hub: Hub, method: str, path: str, body: bytes) -> Answer:
    if path.startswith("/objects/"):
        hub.objects[path.removeprefix("/objects/")] = body
        return Answer(200, {})
    if path == "/api/repos/create":
        return _create(hub, json.loads(body))
    if path == "/api/validate-yaml":
        return Answer(200, {"errors": [], "warnings": []})
    name = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/.]+)(?:\.git)?(/.*)", path)
    if name is None or name[1] not in hub.repositories:
        return Answer(404, {"error": f"there is no {path}"})
    repository, what = hub.repositories[name[1]], name[2]
    if what == "/preupload/main":
        return Answer(200, {"files": [_mode(one) for one in json.loads(body)["files"]]})
    if what == "/info/lfs/objects/batch":
        return Answer(200, {"transfer": "basic", "objects": [_put_to(hub, one) for one in json.loads(body)["objects"]]})
    if what == "/commit/main":
        return _commit(hub, repository, name[1], [json.loads(line) for line in body.splitlines()])
    return Answer(404, {"error": f"{method} {path} is not known here"})


def _create(hub: Hub, asked: dict[str, object]) -> Answer:
    name = "/".join(str(part) for part in (asked.get("organization") or "me", asked["name"]))
    if name in hub.repositories:
        return Answer(409, {"url": f"{hub.address}/{name}", "error": "You already created this model repo"})
    hub.repositories[name] = Repository(private=asked.get("private") is True or asked.get("visibility") == "private")
    return Answer(200, {"url": f"{hub.address}/{name}", "name": name, "id": name})


def _mode(file: dict[str, object]) -> dict[str, object]:
    large = int(str(file["size"])) > REGULAR_NBYTES
    return {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}


def _put_to(hub: Hub, asked: dict[str, object]) -> dict[str, object]:
    href = f"{hub.address}/objects/{asked['oid']}"
    return {"oid": asked["oid"], "size": asked["size"], "actions": {"upload": {"href": href, "header": {}}}}


def _commit(hub: Hub, repository: Repository, name: str, lines: list[dict]) -> Answer:
    for line in lines:
        value = line["value"]
        if line["key"] == "header":
            repository.commits.append(value["summary"])
        elif line["key"] == "file":
            assert value["encoding"] == "base64"
            repository.files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            content = hub.objects[value["oid"]]
            if hashlib.sha256(content).hexdigest() != value["oid"] or len(content) != value["size"]:
                return Answer(400, {"error": f"{value['path']} is not what was announced"})
            repository.files[value["path"]] = content
    commit = hashlib.sha1(str(len(repository.commits)).encode()).hexdigest()
    return Answer(200, {"success": True, "commitOid": commit, "commitUrl": f"{hub.address}/{name}/commit/{commit}"})

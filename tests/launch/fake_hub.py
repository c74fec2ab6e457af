"""A hub on the loopback: the part of the protocol that the hub's own library speaks when it fetches a model."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

LARGE = (".safetensors", ".bin")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass
class Hub:
    """``models``: id -> file name -> content. ``slow``: seconds that each 64 KiB take. ``status``: of every answer.

    ``gated``: everybody may see what a model consists of, and nobody may have it.
    """

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    slow: float = 0.0
    status: int = 200
    gated: bool = False
    claimed: dict[str, int] = field(default_factory=dict)  # sizes that are told in place of the real ones
    commits: dict[str, str] = field(default_factory=dict)  # where main is, when it is not COMMIT
    requests: list[str] = field(default_factory=list)
    url: str = ""

    def add(self, name: str, folder: Path, **more: bytes) -> None:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.models[name] = {**files, **{key.replace("__", "."): data for key, data in more.items()}}

    def fetched(self) -> list[str]:
        """File names that were asked for with GET."""
        return [line.rpartition("/")[2] for line in self.requests if line.startswith("GET") and "/resolve/" in line]

    def commit(self, name: str, revision: str) -> str:
        """What a revision is: a commit itself, and a branch what it is at now."""
        return revision if _COMMIT.fullmatch(revision) else self.commits.get(name, COMMIT)

    def siblings(self, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for file, data in self.models[name].items():
            row: dict[str, Any] = {
                "rfilename": file,
                "size": self.claimed.get(file, len(data)),
                "blobId": etag(data),
            }
            if file.endswith(LARGE):
                row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
            rows.append(row)
        return rows


def etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers from ``hub``."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.status != 200:
            self.answer(b'{"error": "no"}', status=self.hub.status)
        elif path.startswith("/api/models/"):
            self.about(path.removeprefix("/api/models/"))
        else:
            self.file(path.removeprefix("/"))

    def about(self, path: str) -> None:
        path, _, revision = path.partition("/revision/")
        name, tree, _ = path.partition("/tree/")
        if name not in self.hub.models:
            self.answer(b'{"error": "Repository not found"}', status=404, headers={"X-Error-Code": "RepoNotFound"})
            return
        rows = self.hub.siblings(name)
        if tree:
            self.answer(json.dumps(list(map(tree_row, rows))).encode())
            return
        if "blobs" not in parse_qs(urlparse(self.path).query):
            rows = [{"rfilename": row["rfilename"]} for row in rows]
        self.answer(json.dumps({"id": name, "sha": self.hub.commit(name, revision), "siblings": rows}).encode())

    def file(self, path: str) -> None:
        name, _, rest = path.partition("/resolve/")
        revision, _, file = rest.partition("/")
        data = self.hub.models.get(name, {}).get(file)
        if data is None:
            self.answer(b"", status=404, headers={"X-Error-Code": "EntryNotFound"})
            return
        if self.hub.gated:
            self.answer(b"", status=403, headers={"X-Error-Code": "GatedRepo"})
            return
        is_large = path.endswith(LARGE)
        mark = hashlib.sha256(data).hexdigest() if is_large else etag(data)
        headers = {"ETag": f'"{mark}"', "X-Repo-Commit": self.hub.commit(name, revision), "Accept-Ranges": "bytes"}
        if is_large:
            headers |= {"X-Linked-Etag": f'"{mark}"', "X-Linked-Size": str(len(data))}
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.answer(data[start:], status=206 if start else 200, headers=headers)

    def answer(self, data: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for start in range(0, len(data), 1 << 16):
                self.wfile.write(data[start : start + (1 << 16)])
                if "/resolve/" in self.path:
                    time.sleep(self.hub.slow)


def tree_row(row: dict[str, Any]) -> dict[str, Any]:
    entry = {"type": "file", "path": row["rfilename"], "size": row["size"], "oid": row["blobId"]}
    if "lfs" in row:
        entry["lfs"] = {"oid": row["lfs"]["sha256"], "size": row["size"], "pointerSize": 130}
    return entry


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()

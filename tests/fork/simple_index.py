"""A package index that speaks the simple repository API, as HTML or as JSON, and serves the files."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote


class SimpleIndex:
    """Serves wheels on the loopback until the block ends. ``yanked`` maps versions to reasons."""

    def __init__(self) -> None:
        self.wheels: dict[str, Path] = {}
        self.yanked: dict[str, str] = {}
        self.html = False
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                index.answer(self)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/simple"

    def __enter__(self) -> SimpleIndex:
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, wheel: Path) -> None:
        self.wheels[wheel.name] = wheel

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = unquote(request.path.rpartition("/")[2])
        if request.path == "/simple/sglang/":
            kind = "text/html" if self.html else "application/vnd.pypi.simple.v1+json"
            self._send(request, kind, (self._html() if self.html else self._json()).encode())
        elif name in self.wheels:
            self._send(request, "application/zip", self.wheels[name].read_bytes())
        else:
            request.send_error(404)

    def _send(self, request: BaseHTTPRequestHandler, kind: str, data: bytes) -> None:
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _files(self) -> list[tuple[str, str, str]]:
        return [
            (name, hashlib.sha256(path.read_bytes()).hexdigest(), self.yanked.get(name.split("-")[1], ""))
            for name, path in self.wheels.items()
        ]

    def _json(self) -> str:
        files = [
            {"filename": name, "url": f"/files/{name}", "hashes": {"sha256": digest}, "yanked": yanked or False}
            for name, digest, yanked in self._files()
        ]
        return json.dumps({"meta": {"api-version": "1.0"}, "name": "sglang", "files": files})

    def _html(self) -> str:
        links = [
            f'<a href="/files/{name}#sha256={digest}"' + (f' data-yanked="{yanked}"' if yanked else "") + f">{name}</a>"
            for name, digest, yanked in self._files()
        ]
        return f"<!DOCTYPE html><html><body>{'<br/>'.join(links)}</body></html>"

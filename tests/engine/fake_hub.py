"""A local Hugging Face hub that answers huggingface_hub's requests for files: set HF_ENDPOINT to its address."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

_SHA = "a" * 40


class Hub(NamedTuple):
    """A running hub: its address, and the paths that were requested."""

    address: str
    asked: list[str]


@contextlib.contextmanager
def serving(models: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """A hub with `models`: the files of each model by its name."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            self._answer(True)

        def do_HEAD(self) -> None:
            self._answer(False)

        def _answer(self, whole: bool) -> None:
            path = self.path.split("?")[0].lstrip("/")
            asked.append(path)
            status, headers, body = _respond(models, path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if whole:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", asked)
    finally:
        server.shutdown()
        server.server_close()


def _respond(models: Mapping[str, Mapping[str, bytes]], path: str) -> tuple[int, dict[str, str], bytes]:
    parts = path.removeprefix("api/models/").split("/", 4)
    files = models.get("/".join(parts[:2]))
    if files is None:
        return 404, {"X-Error-Code": "RepoNotFound"}, b""
    if path.startswith("api/models/"):
        listing = [{"rfilename": name, "type": "file", "path": name, "size": len(files[name])} for name in files]
        tree = [{**row, "oid": hashlib.sha1(files[row["path"]]).hexdigest()} for row in listing]
        found = tree if "/tree/" in path else {"id": "/".join(parts[:2]), "sha": _SHA, "siblings": listing}
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
    name = parts[-1]
    if name not in files:
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    return 200, {"ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"', "X-Repo-Commit": _SHA}, files[name]

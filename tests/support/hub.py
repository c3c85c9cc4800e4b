"""A Hugging Face hub on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0" * 40


@contextmanager
def hub_of(folder: Path, name: str, kind: str = "models") -> Iterator[str]:
    """A hub that has one model, or with the kind "datasets" one dataset, and the address of it."""
    api, place = f"/api/{kind}/{name}", f"/{name}" if kind == "models" else f"/{kind}/{name}"
    files = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()}

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(sends=False)

        def do_GET(self) -> None:
            self.answer(sends=True)

        def answer(self, sends: bool) -> None:
            path, code = self.path.partition("?")[0], 200
            asked = path.removeprefix(f"{place}/resolve/{COMMIT}/")
            if path == api or path.startswith(f"{api}/revision/"):
                siblings = [{"rfilename": each} for each in files]
                data = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            elif path.startswith(f"{api}/tree/{COMMIT}/"):
                data = b"[]"
            elif path.startswith(f"{api}/tree/"):
                listed = [
                    {"type": "file", "path": each, "size": file.stat().st_size, "oid": each}
                    for each, file in files.items()
                ]
                data = json.dumps(listed).encode()
            elif asked in files:
                data = files[asked].read_bytes()
            else:
                code, data = 404, b"{}"
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if code == 404:
                self.send_header(
                    "X-Error-Code", "RepoNotFound" if path.startswith("/api/") else "EntryNotFound"
                )
            self.end_headers()
            if sends:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()

"""An API server in small: it stores objects by their paths, as Kubernetes would.

    python kube_server.py PORT_FILE

Knows GET of objects and of lists with label selectors, PUT, DELETE, merge patches and server-side
apply, which has to name a field manager.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

APPLY, MERGE = "application/apply-patch+yaml", "application/merge-patch+json"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    objects: dict[str, dict[str, Any]]
    lock: threading.Lock

    def do_GET(self) -> None:
        path, query = self._where()
        with self.lock:
            if path in self.objects:
                self._answer(200, self.objects[path])
            elif path.endswith(("/nodes", "/jobsets")):
                inside = [o for p, o in self.objects.items() if p.rpartition("/")[0] == path]
                wanted = dict(w.split("=") for w in query.get("labelSelector", "").split(",") if w)
                self._answer(200, {"items": [o for o in inside if _matches(o, wanted)]})
            else:
                self._answer(404, {"message": f"{path} not found"})

    def do_PUT(self) -> None:
        path, _ = self._where()
        with self.lock:
            self.objects[path] = self._body()
            self._answer(200, self.objects[path])

    def do_PATCH(self) -> None:
        path, query = self._where()
        kind, body = self.headers["Content-Type"], self._body()
        with self.lock:
            if kind == APPLY and not query.get("fieldManager"):
                self._answer(400, {"message": "fieldManager is required for apply patch"})
            elif kind == APPLY and body["metadata"]["name"] != path.rpartition("/")[2]:
                self._answer(400, {"message": "the name of the object does not match"})
            elif kind == APPLY or (kind == MERGE and path in self.objects):
                self.objects[path] = _merged(self.objects.get(path, {}), body)
                self._answer(200, self.objects[path])
            else:
                self._answer(404, {"message": f"{path} not found"})

    def do_DELETE(self) -> None:
        path, _ = self._where()
        with self.lock:
            found = self.objects.pop(path, None)
            self._answer(200 if found else 404, found or {"message": f"{path} not found"})

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _where(self) -> tuple[str, dict[str, str]]:
        parts = urlsplit(self.path)
        return parts.path, {key: values[0] for key, values in parse_qs(parts.query).items()}

    def _body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return found

    def _answer(self, code: int, document: dict[str, Any]) -> None:
        text = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _matches(thing: dict[str, Any], wanted: dict[str, str]) -> bool:
    labels: dict[str, str] = thing["metadata"].get("labels", {})
    return wanted.items() <= labels.items()


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """As RFC 7396 has it."""
    found = dict(old)
    for key, value in new.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            before = found.get(key)
            found[key] = _merged(before if isinstance(before, dict) else {}, value)
        else:
            found[key] = value
    return found


def main(port_file: Path) -> None:
    """Serve until killed."""
    Handler.objects, Handler.lock = {}, threading.Lock()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    partial = port_file.with_suffix(".partial")
    partial.write_text(str(server.server_address[1]))
    partial.replace(port_file)
    server.serve_forever()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

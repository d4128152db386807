"""Google Cloud Storage as far as Orbax, gcsfs and tensorstore ask for it, on this machine.

Objects live in memory. Google's own stand-ins need its network or a container; this one serves the
JSON API: list, read, write in one piece or several, delete, and batches of deletes.
Conditions on generations are kept, since tensorstore's commits rest on them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

BUCKET = "bucket"
_PART = "\r\nContent-Type: application/http\r\n\r\n"


class Stored(NamedTuple):
    """An object: its bytes, and a number that grows with each change."""

    data: bytes
    generation: int


class _Handler(BaseHTTPRequestHandler):
    """One request; what it changes is the server's."""

    protocol_version = "HTTP/1.1"
    server: GcsStandIn

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        path, query = self._asked()
        store = self.server
        if path == f"/storage/v1/b/{BUCKET}":
            return self._json({"kind": "storage#bucket", "name": BUCKET, "location": "here"})
        if path == f"/storage/v1/b/{BUCKET}/o":
            return self._json(store.listed(query))
        name = _name(path)
        if name is None or name not in store.objects:
            return self._json({"error": {"code": 404, "message": path}}, 404)
        stored = store.objects[name]
        unless = query.get("ifGenerationNotMatch")
        if unless is not None and int(unless) == stored.generation:
            return self._answer(304, b"", {})
        if query.get("alt") != "media":
            return self._json(_resource(name, stored))
        return self._media(stored)

    def _media(self, stored: Stored) -> None:
        data, code, headers = stored.data, 200, {"x-goog-generation": str(stored.generation)}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked and data:
            first = int(asked[1]) if asked[1] else max(0, len(data) - int(asked[2]))
            last = min(int(asked[2]), len(data) - 1) if asked[1] and asked[2] else len(data) - 1
            if first >= len(data):
                return self._answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, code = data[first : last + 1], 206
        self._answer(code, data, headers | {"Content-Type": "application/octet-stream"})

    def do_POST(self) -> None:
        path, query = self._asked()
        body, store = self._body(), self.server
        if path == "/batch/storage/v1":
            return self._batch(body)
        kind = query.get("uploadType")
        if "upload_id" in query:
            return self._piece(body, query)
        if kind == "resumable":
            name = query.get("name") or json.loads(body)["name"]
            upload = store.begin(name)
            place = f"{store.url}{path}?uploadType=resumable&upload_id={upload}"
            return self._answer(200, b"", {"Location": place})
        name, data = (query["name"], body) if kind == "media" else self._multipart(body)
        self._put(name, data, query)

    def do_PUT(self) -> None:
        _, query = self._asked()
        self._piece(self._body(), query)

    def _piece(self, body: bytes, query: dict[str, str]) -> None:
        """One of an upload in several; gcsfs sends them by POST."""
        store = self.server
        total = self.headers["Content-Range"].rpartition("/")[2]
        name, data = store.uploads[query["upload_id"]]
        store.uploads[query["upload_id"]] = (name, data + body)
        if total == "*":
            return self._answer(308, b"", {"Range": f"bytes=0-{len(data + body) - 1}"})
        self._put(name, data + body, query)

    def do_DELETE(self) -> None:
        path, _ = self._asked()
        code = self._delete(path)
        self._answer(code, b"", {})

    def _delete(self, path: str) -> int:
        name = _name(path)
        with self.server.lock:
            return 204 if self.server.objects.pop(name, None) else 404

    def _batch(self, body: bytes) -> None:
        """Deletes, each as a request in a part of the body."""
        answers = []
        for place in re.findall(rb"DELETE (\S+) HTTP", body):
            code = self._delete(urllib.parse.urlsplit(place.decode()).path)
            answers.append(f"--part{_PART}HTTP/1.1 {code} -\r\n\r\n")
        answer = "".join(answers) + "--part--\r\n"
        self._answer(200, answer.encode(), {"Content-Type": "multipart/mixed; boundary=part"})

    def _put(self, name: str, data: bytes, query: dict[str, str]) -> None:
        with self.server.lock:
            there = self.server.objects.get(name)
            wanted = query.get("ifGenerationMatch")
            if wanted is not None and int(wanted) != (there.generation if there else 0):
                return self._json({"error": {"code": 412, "message": "conditionNotMet"}}, 412)
            stored = self.server.put(name, data)
        self._json(_resource(name, stored))

    def _multipart(self, body: bytes) -> tuple[str, bytes]:
        mark = re.search(r"boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])[1].encode()
        _, about, media, _ = body.split(b"--" + mark, 3)
        about, media = (re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1] for part in (about, media))
        return json.loads(about)["name"], media.removesuffix(b"\n").removesuffix(b"\r")

    def _asked(self) -> tuple[str, dict[str, str]]:
        parts = urllib.parse.urlsplit(self.path)
        path = parts.path.removeprefix("/upload").removeprefix("/download")
        self.server.asked.append(f"{self.command} {self.path}")
        return path, dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _json(self, value: Any, code: int = 200) -> None:
        self._answer(code, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        if code not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # whoever asked has been killed
            self.wfile.write(body)


class GcsStandIn(ThreadingHTTPServer):
    """The server, in a thread of its own while used as a context.

    Attributes:
      objects: what it holds, by name.
      asked: every request, as method and path.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Stored] = {}
        self.uploads: dict[str, tuple[str, bytes]] = {}
        self.asked: list[str] = []
        self.lock = threading.RLock()
        self._generations = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, name: str, data: bytes) -> Stored:
        """Writes an object."""
        self.objects[name] = Stored(data, next(self._generations))
        return self.objects[name]

    def begin(self, name: str) -> str:
        """The number of an upload in several pieces."""
        number = f"upload-{next(self._generations)}"
        self.uploads[number] = (name, b"")
        return number

    def listed(self, query: dict[str, str]) -> dict[str, Any]:
        """Objects and what the delimiter makes folders, in one page."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first, end = query.get("startOffset", ""), query.get("endOffset")
        items, folders = [], set()
        for name, stored in sorted(self.objects.copy().items()):
            if not name.startswith(prefix) or name < first or (end and name >= end):
                continue
            rest = name[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(_resource(name, stored))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}

    def handle_error(self, *_: Any) -> None:
        """A client that has gone is no error; any other is in the test's output."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*_)

    def __enter__(self) -> GcsStandIn:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


def _name(path: str) -> str | None:
    found = re.fullmatch(rf"/storage/v1/b/{BUCKET}/o/(.+)", path)
    return urllib.parse.unquote(found[1]) if found else None


def _resource(name: str, stored: Stored) -> dict[str, Any]:
    digest = base64.b64encode(hashlib.md5(stored.data).digest()).decode()
    return {
        "kind": "storage#object", "name": name, "bucket": BUCKET, "size": str(len(stored.data)),
        "generation": str(stored.generation), "metageneration": "1", "md5Hash": digest,
        "updated": "2026-01-01T00:00:00.000Z", "timeCreated": "2026-01-01T00:00:00.000Z",
    }  # fmt: skip

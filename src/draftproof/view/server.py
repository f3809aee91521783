"""The page and some trace files, read-only, on the loopback address."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .bundle import PAGE, TYPES, files

HOST = "127.0.0.1"
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
          "form-action 'none'; frame-ancestors 'none'")
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin", "Cache-Control": "no-store",
}


def serve(traces: Mapping[str, Path], port: int = 0) -> ThreadingHTTPServer:
    """A server, not yet running, of the page and of `traces` by name; port 0 takes a free one. Raises OSError if it is taken."""
    places = {"/" + file.name: file for file in files()} | {"/" + name: path for name, path in traces.items()}
    places["/"] = PAGE / "index.html"
    server = ThreadingHTTPServer((HOST, port), partial(Handler, places))
    server.daemon_threads = True
    return server


class Handler(BaseHTTPRequestHandler):
    """Only the files that were named, only by GET, and only for the loopback's own names: a foreign Host header is another
    site's name that was made to point here."""

    def __init__(self, places: Mapping[str, Path], *rest: Any) -> None:
        self._places = places
        super().__init__(*rest)

    def do_GET(self) -> None:
        name = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if name not in (HOST, "localhost"):
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        file = self._places.get(unquote(urlsplit(self.path).path))
        if file is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            with open(file, "rb") as body:
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", TYPES.get(file.suffix, "application/octet-stream"))
                self.end_headers()
                shutil.copyfileobj(body, self.wfile, 1 << 20)
        except (BrokenPipeError, ConnectionResetError):
            pass                                        # the reader left
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass

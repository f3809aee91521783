"""The page as one HTML file that needs nothing else: modules joined, style inlined, traces packed, all under a policy of hashes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PAGE = Path(__file__).parent / "page"
LESSON = PAGE / "learn.jsonl"

_IMPORT = re.compile(r"^import \{[^}]*\} from '\./([\w-]+\.js)';\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def page(trace: bytes, name: str, note: str = "") -> str:
    """One HTML text with the JSONL `trace` inside, packed. `name` is shown as the file's; `note` is told when it opens."""
    script, style = joined("main.js"), (PAGE / "style.css").read_text(encoding="utf-8")
    policy = (f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; img-src data:; base-uri 'none'; "
              "form-action 'none'")
    data = packed("trace-data", trace, name, note) + packed("learn-data", LESSON.read_bytes(), LESSON.name)
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    for pattern, replacement in (
        (r'(http-equiv="Content-Security-Policy" content=")[^"]*', lambda match: match[1] + policy),
        (r'<link rel="stylesheet"[^>]*>', lambda match: f"<style>{style}</style>"),
        (r'<script type="module"[^>]*></script>\n', lambda match: ""),
        (r"</body>", lambda match: f'{data}<script type="module">{script}</script>\n</body>'),
    ):
        text, count = re.subn(pattern, replacement, text)
        assert count == 1, f"index.html has {count} places for {pattern}"
    return text


def joined(main: str) -> str:
    """The module `main` and all that it imports, those first, as one module. Top-level names are unique over all files."""
    done: list[str] = []

    def visit(name: str) -> None:
        if name in done:
            return
        for other in _IMPORT.findall(source(name)):
            visit(other)
        done.append(name)

    visit(main)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", source(name))) for name in done)


def source(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def digest(text: str) -> str:
    """The hash source of a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def packed(element: str, data: bytes, name: str, note: str = "") -> str:
    """A block that no browser executes: base64 has no character that could end it."""
    body = base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
    return (f'<script type="application/gzip" id="{element}" data-name="{html.escape(name)}" data-note="{html.escape(note)}">'
            f"{body}</script>\n")


def first_requests(lines: Iterable[str], limit: int) -> tuple[bytes, bool]:
    """As many whole requests, from the first on, as pack into about `limit` bytes of base64; and whether that is all of them.

    Lines of requests that run at the same time stand between each other; a request is kept if its last line is.
    """
    kept: list[bytes] = []
    size, ended, counter = 0, 0, _Packing()
    for line in lines:
        data = line.encode()
        size = counter.add(data)
        if size * 4 / 3 > limit:
            return b"".join(kept[:ended]), False
        kept.append(data)
        if b'"event":"request_done"' in data[:40]:
            ended = len(kept)
    return b"".join(kept), True


class _Packing:
    """How many bytes of gzip a growing text takes, known to within a block."""

    def __init__(self) -> None:
        import zlib

        self._packer, self._size = zlib.compressobj(9), 0

    def add(self, data: bytes) -> int:
        self._size += len(self._packer.compress(data))
        return self._size


def files() -> Iterator[Path]:
    """What the page consists of, for whoever serves it."""
    return (file for file in sorted(PAGE.iterdir()) if file.suffix in TYPES)


TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
    ".jsonl": "application/x-ndjson",
}

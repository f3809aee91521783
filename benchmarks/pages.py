"""Results into pages: a command replaces what stands between its marks and leaves the words around them alone."""

from __future__ import annotations

from pathlib import Path


def put(file: Path, name: str, text: str) -> None:
    """Write `text` between `<!-- name: begin -->` and `<!-- name: end -->` of a Markdown file; a file without them gets them at its end,
    and one that is not there is made."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = (file.read_text(encoding="utf-8") if file.exists() else "").partition(begin)
    file.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")

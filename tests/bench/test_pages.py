"""A benchmark's results go between its marks; what people wrote around them stays."""

from __future__ import annotations

from pathlib import Path

from benchmark_module import benchmark


def test_only_what_stands_between_the_marks_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n<!-- a: begin -->\nold\n<!-- a: end -->\n\nwords — stay\n<!-- b: begin -->\nB\n<!-- b: end -->\n", "utf-8")
    for _ in range(2):
        benchmark("pages").put(page, "a", "new\nlines")
    assert page.read_text("utf-8") == ("# Title\n\n<!-- a: begin -->\nnew\nlines\n<!-- a: end -->\n\nwords — stay\n"
                                       "<!-- b: begin -->\nB\n<!-- b: end -->\n")
    page.write_text("# Bare\n", "utf-8")
    benchmark("pages").put(page, "a", "new")
    assert page.read_text("utf-8") == "# Bare\n<!-- a: begin -->\nnew\n<!-- a: end -->"


def test_a_page_that_is_not_there_is_made(tmp_path: Path) -> None:
    benchmark("pages").put(tmp_path / "new.md", "a", "text")
    assert (tmp_path / "new.md").read_text() == "<!-- a: begin -->\ntext\n<!-- a: end -->"


def test_a_command_says_what_was_typed_but_not_where_things_are_kept() -> None:
    words = ["benchmarks/x.py", "--work", "/srv/my models/w", "--env", "a=/srv/b/python", "--shape", "0.6B", "--url", "http://host/v1"]
    said = benchmark("provenance").command(words).split(" ", 1)[1]
    assert said == "benchmarks/x.py --work .../w --env a=.../python --shape 0.6B --url http://host/v1"

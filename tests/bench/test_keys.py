"""The key that bench and prove send, and the class that a line of traffic names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.endpoints import fake

from draftproof.bench.workload import read_items
from draftproof.cli import run


@pytest.mark.parametrize("command", ["bench", "prove"])
@pytest.mark.parametrize("line", ["ops s3cretkey admin", "s3cretkey", "# ours\ns3cretkey trace"])
def test_a_key_file_of_ours_is_read_as_the_server_reads_it(command: str, line: str, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    work, keys = tmp_path / "work.jsonl", tmp_path / "keys"
    work.write_text(json.dumps({"prompt": "abc"}) + "\n")
    keys.write_text(line + "\n")
    more = ["--tokens", "4", "--workload", str(work)] + (["--repeats", "1"] if command == "bench" else ["--level", "run", "--prompts", "1"])
    with fake() as server:
        server.key = "s3cretkey"
        run([command, "--url", server.url, *more, "--api-key-file", str(keys)])
        assert "401" not in capsys.readouterr().err and server.bodies
        assert run([command, "--url", server.url, *more]) == 1
        said = capsys.readouterr().err
    assert "answered 401: expected a key" in said and "--api-key-file" in said


def test_the_class_that_our_server_reads_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [{"prompt": "a", "metadata": {"prompt_class": "rag"}}, {"request": {"prompt": "a", "metadata": {"prompt_class": "code"}}},
             {"prompt": "a", "class": "own", "metadata": {"prompt_class": "rag"}}, {"prompt": "a", "metadata": None}]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [item.prompt_class for item in read_items(log)] == ["rag", "code", "own", "other"]

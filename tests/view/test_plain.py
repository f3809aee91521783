"""The page's plain relatives: one HTML file, lines on a terminal, Perfetto's format, the loopback server, the command."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import subprocess
import threading
import unicodedata
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from traces import HOSTILE, engines, hostile

from draftproof.cli import run
from draftproof.commands.view import terminal_form, write_page
from draftproof.trace.sinks import read_trace
from draftproof.view import bundle, perfetto, server, terminal


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("view") / "engines.jsonl"
    engines(path)
    return path


def embedded(page: str, element: str) -> bytes:
    found = re.search(f'id="{element}"[^>]*>([^<]*)<', page)
    assert found
    return gzip.decompress(base64.b64decode(found[1]))


def test_one_file_holds_the_trace_and_may_run_nothing_else(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    write_page(trace, out)
    page = out.read_text()
    assert embedded(page, "trace-data") == trace.read_bytes()
    assert embedded(page, "learn-data") == bundle.LESSON.read_bytes()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and "unsafe" not in policy[1] and "default-src 'none'" in policy[1]
    scripts = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    assert len(scripts) == 1 and bundle.digest(scripts[0]) in policy[1]
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style and bundle.digest(style[1]) in policy[1]
    assert not re.search(r'(src|href)="(?!#|data:)', page), "the file asks for another"


def test_the_page_is_small_and_asks_for_nothing_foreign() -> None:
    files = [file.read_text(encoding="utf-8") for file in bundle.files()]
    assert sum(len(text.encode()) for text in files) < 300_000
    for text in files:
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text) and "innerHTML" not in text and "eval(" not in text


def test_modules_can_be_joined() -> None:
    joined = bundle.joined("main.js")
    assert not re.search(r"^(import|export) ", joined, re.MULTILINE)
    names = re.findall(r"^(?:async )?(?:function\*?|const|let|class) (\w+)", joined, re.MULTILINE)
    assert len(names) > 50 and len(names) == len(set(names)), "two modules use one top-level name"
    listed = {file.name for file in bundle.PAGE.glob("*.js")}
    missing = [name for name in listed if bundle.source(name).strip().splitlines()[-1].removeprefix("export ") not in joined]
    assert not missing, "modules that are no part of the page"


def test_a_limit_keeps_whole_requests(trace: Path) -> None:
    lines = trace.read_text().splitlines(keepends=True) * 40
    data, whole = bundle.first_requests(lines, 100_000)
    assert not whole and 0 < len(data) < 40 * trace.stat().st_size and b"request_done" in data.splitlines()[-1]
    assert len(bundle.packed("id", data, "name")) < 200_000
    assert bundle.first_requests(lines, 10**9) == (40 * trace.read_bytes(), True)


def test_terminal_lines_fit_and_obey_nobody(tmp_path: Path, trace: Path) -> None:
    path = hostile(tmp_path / "hostile.jsonl")
    for file in (path, trace):
        screen = terminal.Screen()
        lines = [line for event in read_trace(file) for line in screen.lines(event)]
        assert len(lines) > 10
        for line in lines:
            assert terminal.columns(line) <= 80
            assert not any(unicodedata.category(char) in ("Cc", "Cf", "Zl") for char in line), line
    drawn = "".join(lines)
    assert all(glyph in drawn for glyph in "■×→+")


@pytest.mark.parametrize("width", [1, 10, 20, 45, 46, 80])
def test_terminal_lines_fit_any_window_and_figure(width: int, tmp_path: Path, trace: Path) -> None:
    node = {"token": 1, "parent": -1, "fate": "rejected"}
    times = {"draft_s": 9.9999, "score_s": 12345.6, "verify_s": 0.0, "other_s": 0.0}
    path = short(tmp_path / "t.jsonl", {**ROUND, "round": 1234567, "nodes": [node] * 1024, "text": "word " * 30, "times": times}, DONE)
    for file in (path, trace):
        bare, coloured = terminal.Screen(width), terminal.Screen(width, True)
        for event in read_trace(file):
            for plain, painted in zip(bare.lines(event), coloured.lines(event), strict=True):
                assert terminal.columns(plain) <= width and re.sub(r"\x1b\[[0-9;]*m", "", painted) == plain


def test_lines_of_several_requests_say_whose_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in short(tmp_path / "t.jsonl", ROUND, DONE).read_text().splitlines()]
    header, started, prefill, round_, done = lines
    other = "hostile\u001b[31m name"
    path = short(tmp_path / "two.jsonl", {**started, "request": other}, *({**one, "request": name} for one in (prefill, round_, done)
                                                                       for name in (other, "r")))
    assert run(["view", str(tmp_path / "t.jsonl"), "--terminal"]) == 0
    alone = capsys.readouterr().out.splitlines()
    assert alone[0] == terminal.LEGEND and len(alone[0]) <= 80 and all(glyph in alone[0] for glyph in terminal.GLYPHS.values())
    assert alone[-2].startswith("     0 ■ ") and alone[-1].startswith("done r (length)")
    assert run(["view", str(path), "--terminal"]) == 0
    mixed = capsys.readouterr().out.splitlines()
    heads = [line.split()[0] for line in mixed if "guesses" in line]
    assert mixed.count(terminal.LEGEND) == 1 and heads == ["round", "request"], "one before the second request began, one after"
    rounds = [line for line in mixed if "■" in line and line != terminal.LEGEND]
    assert [line[:16] for line in rounds] == ["hostil…      0 ■", "r            0 ■"]
    assert [line.split(" (")[0] for line in mixed[-2:]] == ["done hostile⟨001B⟩[31m name", "done r"]


def test_terminal_colour_is_only_paint() -> None:
    assert terminal.paint("■", "accepted", False) == "■"
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.paint("■", "accepted", True)) == "■"
    assert terminal.fit("abcdef", 4) == "abc…" and terminal.fit("abcd", 4) == "abcd" and terminal.fit("漢字漢字", 5) == "漢字…"
    with open(__file__) as file:
        assert terminal_form(file) == (80, False)


def test_perfetto_has_every_phase_once(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    with out.open("w") as file:
        spans = perfetto.write(read_trace(trace), file)
    records = json.loads(out.read_text())["traceEvents"]
    events = list(read_trace(trace))
    rounds = [event for event in events if event.event == "round_done"]
    assert spans == 4 * len(rounds) + sum(event.event == "prefill_done" for event in events)
    total = sum(record["dur"] for record in records if record["ph"] == "X" and record["name"] == "score")
    assert total == pytest.approx(1e6 * sum(event.times.score_s for event in rounds))
    assert len({record["pid"] for record in records}) == sum(event.event == "request_started" for event in events)


def test_the_server_serves_named_files_to_loopback_names_only(trace: Path) -> None:
    http = server.serve({"trace.jsonl": trace})
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{http.server_address[1]}"
        with urllib.request.urlopen(base + "/?trace=trace.jsonl") as answer:
            assert b"Draftproof" in answer.read() and "script-src 'self'" in answer.headers["Content-Security-Policy"]
        with urllib.request.urlopen(base + "/trace.jsonl") as answer:
            assert answer.read() == trace.read_bytes() and answer.headers["X-Content-Type-Options"] == "nosniff"
        for path, host, code in (("/../bundle.py", None, 404), ("/bundle.py", None, 404), ("/", "evil.example", 421),
                                 ("/%2e%2e/server.py", None, 404)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(base + path, headers={"Host": host} if host else {}))
            assert refused.value.code == code
            refused.value.close()
    finally:
        http.shutdown()
        http.server_close()


@pytest.mark.parametrize(("content", "told"), [
    ("", "no record"), ("{}\n", "line 1"), ('{"event":"round_done"}\n', "line 1"), ("\x00\x01\n", "line 1"),
    ('{"event":"trace_started","version":99,"target":"t","drafter":"d","rule":"match","depth":"1"}\n', "upgrade"),
    ('{"event":"request_started","request":"r0","at_s":0.0,"prompt_tokens":1,"cached_tokens":0,"sampling":{},"seed":1,"sample":0}\n',
     "beginning"),
])
def test_what_is_no_trace_is_told(content: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    for option in (["--terminal"], ["--html", str(tmp_path / "out.html")], ["--perfetto", str(tmp_path / "out.json")]):
        assert run(["view", str(path), *option]) == 1
        assert told in capsys.readouterr().err
    assert not (tmp_path / "out.html").exists()


ROUND = {"event": "round_done", "request": "r", "round": 0, "at_s": 0.2, "batch": 1, "position": 4, "depth": 1, "drafter": "d",
         "reason": "", "draft_reason": "", "nodes": [{"token": 1, "parent": -1, "fate": "accepted"}],
         "tokens": [{"token": 1, "role": "accepted"}], "text": "你好",
         "times": {"draft_s": 0.0, "score_s": 0.1, "verify_s": 0.0, "other_s": 0.0}}
DONE = {"event": "request_done", "request": "r", "at_s": 0.3, "finish": "length", "completion_tokens": 2,
        "metrics": {"drafted": None, "accepted": None, "draft_bytes": None, "kv_tokens_lost": None}}


def short(path: Path, *records: dict[str, object]) -> Path:
    """A trace of one request with these records behind its prefill."""
    header = {"event": "trace_started", "version": 1, "target": "t", "drafter": "d", "rule": "match", "depth": "1"}
    started = {"event": "request_started", "request": "r", "at_s": 0.0, "prompt_tokens": 3, "cached_tokens": 0, "sampling": {}, "seed": 1,
               "sample": 0}
    prefill = {"event": "prefill_done", "request": "r", "at_s": 0.1, "seconds": 0.1, "passes": 1, "token": {"token": 0, "role": "prefill"},
               "text": "a"}
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in (header, started, prefill, *records)]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def options(folder: Path) -> list[list[str]]:
    return [["--terminal"], ["--html", str(folder / "a.html")], ["--perfetto", str(folder / "a.json")]]


def test_a_trace_cut_within_a_character_is_read_up_to_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = short(tmp_path / "t.jsonl", ROUND, {**ROUND, "round": 1})
    path.write_bytes(path.read_bytes()[:path.read_bytes().rindex("好".encode()) + 1])
    assert [event.event for event in read_trace(path)] == ["trace_started", "request_started", "prefill_done", "round_done"]
    for option in options(tmp_path):
        assert run(["view", str(path), *option]) == 0
    assert "你好" in capsys.readouterr().out


def test_a_packed_trace_is_read(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(trace.read_bytes()))
    assert list(read_trace(packed)) == list(read_trace(trace))
    for option in options(tmp_path):
        assert run(["view", str(packed), *option]) == 0
    assert embedded((tmp_path / "a.html").read_text(), "trace-data") == trace.read_bytes()
    packed.write_bytes(packed.read_bytes()[:-20])
    capsys.readouterr()
    assert run(["view", str(packed), "--terminal"]) == 1 and "expected a JSONL trace" in capsys.readouterr().err


@pytest.mark.parametrize(("record", "told"), [
    ({**ROUND, "at_s": float("nan")}, "at_s is nan"), ({**ROUND, "at_s": "soon"}, "real number"),
    ({**ROUND, "nodes": [{"token": 1, "parent": 0, "fate": "accepted"}]}, "parent 0"),
    ({**ROUND, "nodes": [{"token": 1, "parent": -1, "fate": "lost"}]}, "'lost'"),
    ({**ROUND, "tokens": [{"token": 1, "role": "king"}]}, "'king'"),
    ({**ROUND, "times": {"draft_s": 0.0, "score_s": float("inf"), "verify_s": 0.0, "other_s": 0.0}}, "times are 0.0, inf"),
    ({**DONE, "metrics": None}, "metrics"), ({**DONE, "completion_tokens": None}, "real number"),
])
def test_damaged_records_are_told_with_their_line(record: dict[str, object], told: str, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    path = short(tmp_path / "t.jsonl", record)
    for option in [*options(tmp_path), ["--chart", "all", "--out", str(tmp_path / "out")]]:
        assert run(["view", str(path), *option]) == 1
        error = capsys.readouterr().err
        assert told in error and "line 4" in error and "unforeseen" not in error


def test_metrics_that_are_not_told_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = short(tmp_path / "t.jsonl", DONE)
    for option in options(tmp_path):
        assert run(["view", str(path), *option]) == 0
    assert "None" not in capsys.readouterr().out
    odd = short(tmp_path / "odd.jsonl", {**ROUND, "tokens": []}, DONE)
    assert run(["view", str(odd), "--terminal"]) == 0
    assert run(["view", str(odd), "--chart", "all", "--out", str(tmp_path / "out")]) == 1
    assert "accepted guesses: 1, tokens: 0" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    rounds = short(tmp_path / "r.jsonl", *({**ROUND, "round": n, "nodes": [], "tokens": []} for n in range(4)), DONE)
    assert run(["view", str(rounds), "--chart", "all", "--out", str(tmp_path / "out")]) == 0
    assert "unforeseen" not in capsys.readouterr().err


def test_the_command(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["view", str(trace), "--terminal", "--html", str(tmp_path / "a.html"), "--perfetto", str(tmp_path / "a.json.gz")]) == 0
    assert "×" in capsys.readouterr().out
    assert json.loads(gzip.decompress((tmp_path / "a.json.gz").read_bytes()))["traceEvents"]
    assert run(["view", str(tmp_path / "none.jsonl")]) == 2
    assert run(["view", str(trace), "--terminal", "--port", "1"]) == 2
    assert run(["view", str(trace), "--html", str(tmp_path / "no" / "a.html")]) == 2
    capsys.readouterr()


@pytest.mark.parametrize("option", [["--html"], ["--perfetto"], ["--chart", "tree", "--out"]])
def test_no_output_is_written_over_an_input(option: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, other, link = tmp_path / "mine.svg", tmp_path / "other.svg", tmp_path / "link.svg"
    for file in (mine, other):
        shutil.copy(trace, file)
    link.symlink_to(mine)
    for out in (mine, link, tmp_path / "." / "mine.svg"):
        assert run(["view", str(mine), *option, str(out)]) == 2 and "TRACE" in capsys.readouterr().err
    assert run(["view", str(mine), "--chart", "compare", "--with", str(other), "--out", str(other)]) == 2
    assert "--with" in capsys.readouterr().err
    assert mine.read_bytes() == other.read_bytes() == trace.read_bytes()


def test_charts_in_a_folder_are_not_written_over_the_trace(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(trace, tmp_path / "tree.svg")
    assert run(["view", str(tmp_path / "tree.svg"), "--chart", "tree", "--out", str(tmp_path)]) == 2
    assert "--chart" in capsys.readouterr().err and (tmp_path / "tree.svg").read_bytes() == trace.read_bytes()


def test_two_outputs_are_two_files(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "a")
    assert run(["view", str(trace), "--html", out, "--perfetto", out]) == 2 and "--html" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_damaged_trace_leaves_what_was_written_before(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged, link = tmp_path / "damaged.jsonl", tmp_path / "link.json"
    damaged.write_bytes(trace.read_bytes() + b"damage\n")
    for option, name in (("--html", "a.html"), ("--perfetto", "a.json"), ("--perfetto", "a.json.gz")):
        out = tmp_path / name
        out.touch(mode=0o600)
        assert run(["view", str(trace), option, str(out)]) == 0
        before = out.read_bytes()
        assert run(["view", str(damaged), option, str(out)]) == 1 and "not a line of a trace" in capsys.readouterr().err
        assert out.read_bytes() == before and out.stat().st_mode & 0o777 == 0o600
    link.symlink_to(tmp_path / "a.json")
    assert run(["view", str(trace), "--perfetto", str(link)]) == 0 and link.is_symlink()
    assert run(["view", str(trace), "--html", "/dev/null", "--perfetto", "/dev/null"]) == 0 and Path("/dev/null").is_char_device()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.html", "a.json", "a.json.gz", "damaged.jsonl", "link.json"]


def test_words_are_added_once_and_only_where_missing(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.html"
    write_page(trace, out, vocabulary=HOSTILE)
    headers = [json.loads(line) for line in embedded(out.read_text(), "trace-data").decode().split("\n") if "trace_started" in line[:30]]
    assert headers[0]["vocabulary"] == HOSTILE and not any(header.get("vocabulary") for header in headers[1:])


@pytest.mark.skipif(shutil.which("node") is None, reason="no node: the browser tests run the same modules")
def test_formulas_and_noise_equal_the_engine_s() -> None:
    import torch

    from draftproof.core import budget
    from draftproof.core.noise import gumbel, key, key_rows

    program = """
    import { breakEven, expectedTokens, speedup } from './budget.js';
    import { gumbel, noiseBits, noiseKey } from './noise.js';
    import { assign } from './words.js';
    const out = { vectors: [[0n, 0, 0], [1n, 0, 7]].map(([s, i, p]) => [0, 1, 128255].map((t) => noiseBits(noiseKey(s, i, p), t))),
      noise: [0, 1, 500, 128255].map((t) => gumbel(noiseKey(2n ** 63n - 1n, 3, 131071), t)),
      even: breakEven(4, 0.1, 1.2, 0.05), tokens: expectedTokens([0.9, 0.8, 0.5]), gain: speedup(3, 4, 0.1, 1.1, 0.02),
      words: [assign(['a', '\\ufffd', '\\ufffd', 'b'], 'a\\u{1F680}b'), assign([' x', 'y'], ' xy'), assign(['\\ufffd'], '')] };
    console.log(JSON.stringify(out));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", program], cwd=bundle.PAGE, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["vectors"] == [[0xFE97ADB4, 0xD015AA68, 0x3201C35D], [0xBFC6FC35, 0x95CD37C7, 0x327EDF60]]
    mine = gumbel(key_rows([key(2**63 - 1, 3, "text", 131071)], "cpu"), torch.tensor([0, 1, 500, 128255]))[0]
    assert found["noise"] == pytest.approx(mine.tolist(), rel=1e-6)
    assert found["even"] == pytest.approx(budget.break_even(4, 0.1, 1.2, 0.05))
    assert found["gain"] == pytest.approx(budget.speedup(3, 4, 0.1, 1.1, 0.02))
    assert found["tokens"] == pytest.approx(budget.expected_tokens([0.9, 0.8, 0.5]))
    assert found["words"] == [["a", "", "🚀", "b"], [" x", "y"], [""]]


def test_generate_shows_rounds_as_they_run(tiny_pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = tiny_pair
    arguments = ["generate", "def add(", "--target", str(target), "--drafter", f"model:{drafter}", "--depth", "3", "--max-tokens", "12",
                 "--temperature", "0.8", "--seed", "1", "--dtype", "float32"]
    assert run(arguments) == 0
    text = capsys.readouterr().out
    assert run([*arguments, "--show"]) == 0
    shown = capsys.readouterr()
    assert shown.out == text, "showing changes nothing of the result"
    lines = [line for line in shown.err.splitlines() if re.match(r" +\d+ [■×·→+o… ]{14} ", line)]
    assert len(lines) >= 3 and all(terminal.columns(line) <= 80 for line in lines) and "\x1b" not in shown.err

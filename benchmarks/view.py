"""The page on a long trace, in headless Chromium: time to the first screen, memory, frames a second. The last line is JSON.

    python benchmarks/view.py [--rounds 100000] [--repeat 3] [--whole]

The trace is generated: level full, one request, about 1.3 kB a round. Needs Chromium, its driver and draftproof[dev,browser]. Frames are
told beside those of the same page at rest, since other work on the machine takes them too. --whole also parses every line at once into
objects, as a page without an index would.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "view"))

from browser import Page, chromium, serving
from provenance import provenance
from traces import many

from draftproof.commands.view import EMBEDDED_LIMIT
from draftproof.view import bundle

FRAMES = """const step = arguments[0], length = arguments[1];
    return new Promise((done) => {
      const list = document.querySelector('#rounds'), start = performance.now(), lasted = [];
      let before = start;
      const frame = (now) => {
        if (step) list.scrollTop = (list.scrollTop + step) % (list.scrollHeight - list.clientHeight);
        lasted.push(now - before);
        before = now;
        if (performance.now() - start < length) requestAnimationFrame(frame); else done(lasted.slice(1));
      };
      requestAnimationFrame(frame); })"""
WHOLE = """const answer = await (await fetch(arguments[0])).text();
    window.kept = answer.trimEnd().split('\\n').map((line) => JSON.parse(line));
    return window.kept.length;"""
GOALS = {"first_screen_s": 3.0, "heap_mb": 300.0, "frames_per_s": 50.0, "page_mb": 2.0}


def once(page: Page, address: str) -> dict[str, float]:
    """Open the trace in a fresh document."""
    page.driver.get("about:blank")
    began = time.monotonic()
    page.driver.get(address)
    page.until("document.querySelector('main [data-metric=rounds]') !== null", 120)
    first = time.monotonic() - began
    page.until("performance.getEntriesByName('draftproof-loaded').length > 0", 300)
    whole = time.monotonic() - began
    page.js("if (window.gc) window.gc()")
    return {"first_screen_s": first, "all_read_s": whole, "heap_mb": heap(page), "renderer_mb": renderer(page)}


def heap(page: Page) -> float:
    return float(page.js("return performance.memory.usedJSHeapSize")) / 1e6


def renderer(page: Page) -> float:
    """Resident memory of the browser's largest renderer, MB: it has the bytes of buffers, which no count of the heap is sure to have."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue                                  # it has ended meanwhile
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    waiting, most = [page.driver.service.process.pid], 0.0
    while waiting:
        for process in children.get(waiting.pop(), []):
            waiting.append(process)
            command = Path(f"/proc/{process}/cmdline").read_bytes()
            if b"--type=renderer" in command:
                resident = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096 / 1e6
                most = max(most, resident)
    return most


def frames(page: Page, milliseconds: int) -> dict[str, float]:
    """Frames a second while the list of rounds scrolls by 97 pixels a frame, and at rest, in turns; and the processor time of the page's
    main thread, which tells what a frame costs whatever else the machine does."""
    page.show("rounds", r=0, round=50)
    page.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    found: dict[str, list[float]] = {"scroll": [], "rest": []}
    spent = dict.fromkeys(found, 0.0)
    for _ in range(4):
        for name, step in (("rest", 0), ("scroll", 97)):
            before = busy(page)
            found[name] += page.js(FRAMES, step, milliseconds)
            spent[name] += busy(page) - before
    slow = sorted(found["scroll"])
    return {"frames_per_s": 1e3 * len(slow) / sum(slow), "frames_per_s_at_rest": 1e3 * len(found["rest"]) / sum(found["rest"]),
            "thread_ms_per_frame": 1e3 * spent["scroll"] / len(slow), "frame_ms_median": median(slow),
            "frame_ms_p95": slow[int(0.95 * len(slow))],
            "rows_in_page": page.js("return document.querySelectorAll('#rounds .row').length")}


def busy(page: Page) -> float:
    """Seconds of processor time that the page's main thread has spent on tasks."""
    told = page.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return float(next(one["value"] for one in told if one["name"] == "TaskDuration"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, chromium() as page:
        path = many(Path(folder) / "many.jsonl", options.rounds)
        with serving({"many.jsonl": path}) as address:
            runs = [once(page, address("many.jsonl")) for _ in range(options.repeat)]
            result = {name: median(run[name] for run in runs) for name in runs[0]} | frames(page, 1500)
            result["heap_after_scrolling_mb"] = heap(page)
            if options.whole:
                page.driver.get(address("") + "?none")
                page.driver.set_script_timeout(300)
                page.driver.execute_async_script(
                    f"const done = arguments[1]; (async () => {{ {WHOLE} }})().then(done, (e) => done(String(e)))", "many.jsonl")
                result["parsed_whole_heap_mb"] = heap(page)
        result["trace_mb"] = path.stat().st_size / 1e6
    bare = len(bundle.page(b"", "trace.jsonl"))
    result["page_mb"] = (bare + EMBEDDED_LIMIT) / 1e6            # of the demo at most: its trace is cut to this
    for name, value in result.items():
        goal = f"   goal {'≥' if name == 'frames_per_s' else '<'} {GOALS[name]:g}" if name in GOALS else ""
        print(f"{name:26} {value:10.2f}{goal}")
    print(json.dumps({**provenance(), "rounds": options.rounds, "page": {name: round(value, 3) for name, value in result.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

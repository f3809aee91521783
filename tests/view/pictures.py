"""Every view of the page as a picture: light, dark, and as wide as a phone. With names behind the folder only these.

    python tests/view/pictures.py draftproof-demo.html docs/images status-light tree-light race-dark

The demo's page shows a run on repetitive text; the race is caught when the first of the two has finished. Views that need more than
its level (Tree, Verification) show the lesson that the page brings along. Needs Chromium, its driver and draftproof[dev,browser].
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from browser import VIEWS, chromium, serving

from draftproof.trace.figures import runs
from draftproof.trace.sinks import read_trace
from draftproof.view import bundle

FORMS = {"light": (1200, 800, False), "dark": (1200, 800, True), "phone": (390, 780, False)}
TAUGHT = ("tree", "verification", "learn")
TREES, ROUND = 2, 3                          # the lesson's request whose guesses are trees


def traced(page: Path) -> str:
    """The trace in the demo's page, with token texts, and without the folders in which the target lies: a picture is for everybody."""
    found = re.search('id="trace-data"[^>]*>([^<]*)<', page.read_text(encoding="utf-8"))
    assert found, f"{page} is not the page that `draftproof demo` writes"
    text = gzip.decompress(base64.b64decode(found[1])).decode()
    return re.sub(r'"target":("(?:[^"\\]|\\.)*")', lambda part: f'"target":{json.dumps(Path(json.loads(part[1])).name)}', text)


def guessed(trace: Path) -> int:
    """Which request of the demo's trace to show: the first by n-grams on repetitive text."""
    shown = (run for run in runs(read_trace(trace)) if run.guesses and run.report.drafter == "ngram")
    return next((run.index for run in shown if run.started.prompt_class.startswith("data")), 0)


def take(trace: Path, out: Path, wanted: list[str]) -> None:
    with chromium() as page, serving({"demo.jsonl": trace, "lesson.jsonl": bundle.LESSON}) as address:
        for form, (width, height, dark) in FORMS.items():
            page.size(width, height, dark)
            for view in VIEWS:
                if wanted and f"{view}-{form}" not in wanted:
                    continue
                taught = view in TAUGHT
                page.open(address("lesson.jsonl" if taught else "demo.jsonl"))
                page.show(view, r=TREES if taught else guessed(trace), round=ROUND)
                if view == "race":
                    page.js("document.querySelector('#race-start').click()")
                    page.until("document.querySelector('main').innerText.includes('finished')")
                page.driver.save_screenshot(str(out / f"{view}-{form}.png"))
                assert page.errors() == [], (view, form)


def main() -> None:
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "demo.jsonl"
        trace.write_text(traced(Path(sys.argv[1])), encoding="utf-8")
        take(trace, Path(sys.argv[2]), sys.argv[3:])


if __name__ == "__main__":
    main()

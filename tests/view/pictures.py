"""Every view of the page as a picture: light, dark, and as wide as a phone.

    python tests/view/pictures.py draftproof-demo.jsonl docs/images

The demo's trace shows a run on repetitive text. Views that need more than its level (Tree, Verification) show the lesson that the page
brings along. Needs Chromium, its driver and draftproof[dev,browser].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from browser import VIEWS, chromium, serving

from draftproof.view import bundle

FORMS = {"light": (1200, 800, False), "dark": (1200, 800, True), "phone": (390, 780, False)}
TAUGHT = ("tree", "verification", "learn")
ROUND = 3


def guessed(trace: Path) -> int:
    """Which request of the demo's trace to show: the first by n-grams on repetitive text."""
    started = [json.loads(line) for line in trace.read_text(encoding="utf-8").splitlines() if '"request_started"' in line[:30]]
    return next((i for i, one in enumerate(started) if one["drafter"] == "ngram" and str(one["prompt_class"]).startswith("data")), 0)


def main() -> None:
    trace, out = Path(sys.argv[1]), Path(sys.argv[2])
    with chromium() as page, serving({"demo.jsonl": trace, "lesson.jsonl": bundle.LESSON}) as address:
        for form, (width, height, dark) in FORMS.items():
            page.size(width, height, dark)
            for view in VIEWS:
                taught = view in TAUGHT
                page.open(address("lesson.jsonl" if taught else "demo.jsonl"))
                page.show(view, r=0 if taught else guessed(trace), round=ROUND)
                page.driver.save_screenshot(str(out / f"{view}-{form}.png"))
                assert page.errors() == [], (view, form)


if __name__ == "__main__":
    main()

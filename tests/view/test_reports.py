"""The pages beside the page, in a browser: measurements, and what an experiment found. They fit a phone, and axe finds nothing."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, chromium
from serve.serving import letters, serving
from test_browser import AXE, SERIOUS

from draftproof.bench import report

pytestmark = pytest.mark.browser
WIDTH = 390


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as tab:
        tab.size(WIDTH, 800)
        yield tab


def looked_at(page: Page, address: str) -> None:
    """Raises AssertionError where a phone's reader, or one without a mouse or eyes, is left out."""
    page.driver.get(address)
    page.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": gzip.decompress(AXE.read_bytes()).decode()})
    assert page.js(SERIOUS) == []
    assert page.js("return document.documentElement.scrollWidth") == WIDTH


def test_a_measurement_fits_a_phone(page: Page, tmp_path: Path) -> None:
    table = report.html_table([f"column {i}" for i in range(12)], [["a value"] * 12] * 3)
    file = tmp_path / "bench.html"
    file.write_text(report.page("draftproof bench", f"{table}<pre>{'a long command line ' * 20}</pre>"), encoding="utf-8")
    looked_at(page, file.as_uri())


def test_an_experiment_fits_a_phone_and_keeps_its_reader_s_place(page: Page) -> None:
    with serving(letters(), "ngram", depth=3) as running:
        running.complete(prompt="ababab", seed=1, max_tokens=20, ignore_eos=True)
        looked_at(page, f"{running.url}/draftproof/ab")
        page.js("[...document.querySelectorAll('a')].find((one) => one.textContent.includes('15 seconds')).click()")
        page.until("document.querySelector('meta[http-equiv=refresh]')?.content === '15'")

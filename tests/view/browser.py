"""Headless Chromium for the tests of the page."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftproof.view import server

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
VIEWS = ("status", "text", "rounds", "tree", "verification", "gantt", "acceptance", "pays", "race", "compare", "learn")


class Page:
    """A tab, with the few questions that the tests ask of it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def js(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: str, seconds: float = 15) -> Any:
        """The value of a JavaScript expression once it is true."""
        end = time.monotonic() + seconds
        while True:
            value = self.js(f"return {condition}")
            if value:
                return value
            assert time.monotonic() < end, f"never true: {condition}; the page says: {self.text()[:400]} {self.errors()}"
            time.sleep(0.03)

    def open(self, address: str) -> None:
        self.driver.get("about:blank")
        self.errors()
        self.driver.get(address)
        self.until("document.querySelector('main .panel') !== null && !document.querySelector('main').hasAttribute('aria-busy')")

    def show(self, view: str, **where: int) -> None:
        query = "&".join(f"{name}={value}" for name, value in where.items())
        self.js("location.hash = arguments[0]", f"#/{view}?{query}")
        self.until(f"document.querySelector('body > nav a[aria-current]')?.dataset.view === '{view}'")
        self.js("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def text(self) -> str:
        return str(self.js("return document.body.innerText"))

    def metrics(self) -> dict[str, Any]:
        """Every number by its name; read here, as a browser rounds seeds beyond 2**53."""
        shown = self.js("return Object.fromEntries([...document.querySelectorAll('[data-metric]')]"
                        ".map((e) => [e.dataset.metric, e.dataset.value]))")
        return {name: json.loads(value) for name, value in shown.items()}

    def keys(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def size(self, width: int, height: int, dark: bool = False) -> None:
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                    {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500})
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})


@contextmanager
def chromium() -> Iterator[Page]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="pip install -e .[browser]")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium and chromedriver are not on the path")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,900",
                     "--enable-precise-memory-info"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_script_timeout(60)
        yield Page(driver)
    finally:
        driver.quit()


@contextmanager
def serving(traces: dict[str, Path]) -> Iterator[Callable[[str], str]]:
    """The page's own server; the value gives the address of the page on one of the traces."""
    http = server.serve(traces)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield lambda name: f"http://127.0.0.1:{http.server_address[1]}/?trace={name}" if name else f"http://127.0.0.1:{http.server_address[1]}/"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()

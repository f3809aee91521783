"""The page against the real server: its numbers are those of /metrics and of `generate --json`; chat, stop, race, keys, switch."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, DRIVER, Page, chromium
from prometheus_client.parser import text_string_to_metric_families
from serve.serving import Running, letters, serving
from test_browser import AXE, SERIOUS

from draftproof.config import ServeConfig
from draftproof.serve.gate import Key

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no browser")]

PARAGRAPH = "def test_add(self):\n    self.assertEqual(add(1, 2), 3)"
QUESTION = f"Repeat this paragraph three times:\n\n{PARAGRAPH}"
TOKENS = 96
ARGUMENTS = ("--drafter", "ngram", "--depth", "4", "--threads", "1")
COUNTERS = {"rounds": "rounds_total", "target_passes": "target_passes_total", "prompt_tokens": "prompt_tokens_total",
            "completion_tokens": "generation_tokens_total", "drafted": "spec_decode_num_draft_tokens_total",
            "accepted": "spec_decode_num_accepted_tokens_total"}
TIMED = {"tokens_per_s", "ttft_s", "tpot_s", "draft_s", "score_s", "verify_s", "other_s"}       # of a run, not of a text


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as tab:
        yield tab


@pytest.fixture(scope="module")
def demo() -> Iterator[str]:
    """`draftproof serve` with the built-in model: its address."""
    command = [sys.executable, "-m", "draftproof", "serve", *ARGUMENTS, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the server does not start"
            yield found[0]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, "a page that is open holds the server up"


def asked(url: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as reply:
        text = reply.read().decode()
    return json.loads(text) if text.startswith("{") else text


def counters(url: str, key: str = "") -> dict[str, Any]:
    """/metrics: sums by name after the prefix; accepted tokens by position as a list."""
    found: dict[str, Any] = {}
    places: dict[int, float] = {}
    for family in text_string_to_metric_families(asked(url + "/metrics", key=key)):
        for sample in family.samples:
            name = sample.name.removeprefix("draftproof:")
            found[name] = found.get(name, 0) + sample.value
            if name == "spec_decode_num_accepted_tokens_per_pos_total":
                places[int(sample.labels["position"])] = sample.value
            if name == "request_success_total":
                found[sample.labels["finished_reason"]] = found.get(sample.labels["finished_reason"], 0) + sample.value
    return {**found, "passed": [places[i] for i in sorted(places)]}


def ask(page: Page, text: str, button: str = "chat-send", ended: int = 1, **boxes: Any) -> None:
    """Fill the chat's boxes and press; until so many answers have ended well."""
    page.until("document.querySelector('#chat-send') !== null", 60)
    for name, value in {"prompt": text, **boxes}.items():
        page.js("document.querySelector(`.chat [name=${arguments[0]}]`).value = arguments[1]", name, str(value))
    page.js(f"document.querySelector('#{button}').click()")
    if ended:
        page.until(f"document.querySelectorAll('#chat-answer [data-ended=done]').length === {ended}", 120)


def finished(page: Page, tokens: int) -> dict[str, Any]:
    """The numbers of the request in sight, once all its events are there."""
    page.until(f"document.querySelector('[data-metric=completion_tokens]')?.dataset.value === '{tokens}'", 30)
    page.until("[...document.querySelectorAll('.facts dd')].some((e) => ['length', 'stop', 'cancelled'].includes(e.textContent))", 30)
    return page.metrics()


def shot(page: Page, name: str) -> None:
    if folder := os.environ.get("DRAFTPROOF_IMAGES"):
        page.driver.save_screenshot(str(Path(folder) / f"{name}.png"))


def test_one_number_in_the_page_in_metrics_and_in_generate(page: Page, demo: str) -> None:
    page.open(demo)
    before = counters(demo)
    ask(page, QUESTION, temperature=0, seed=1, max_tokens=TOKENS)
    shown, after = finished(page, TOKENS), counters(demo)

    ids = asked(demo + "/tokenize", {"messages": [{"role": "user", "content": QUESTION}]})["tokens"]
    command = [sys.executable, "-m", "draftproof", "generate", "--prompt-ids", " ".join(map(str, ids)), *ARGUMENTS,
               "--temperature", "0", "--seed", "1", "--max-tokens", str(TOKENS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])

    numbers = {name: value for group in (said, said["metrics"], said["speculation"]) for name, value in group.items()
               if isinstance(value, int | float) or name == "hazard"}
    assert set(said["metrics"]) <= set(numbers) and {"prompt_tokens", "completion_tokens", "seed", "depth"} <= set(numbers)
    assert set(numbers) <= set(shown), "every number that generate prints stands in the page"
    assert {name: shown[name] for name in numbers if name not in TIMED} == {name: numbers[name] for name in numbers if name not in TIMED}
    assert all(shown[name] > 0 for name in TIMED)

    def counted(name: str) -> float:
        return float(after.get(name, 0) - before.get(name, 0))

    for name, counter in COUNTERS.items():
        assert counted(counter) == numbers[name], name
    assert after["spec_decode_passes_saved"] - before.get("spec_decode_passes_saved", 0) == numbers["passes_saved"]
    if not before["passed"]:
        reached = [after["passed"][i] / hazard if hazard else 0 for i, hazard in enumerate(numbers["hazard"])]
        assert all(count == pytest.approx(round(count)) for count in reached), "hazard[i] is passed over reached, whole numbers"

    # copies two and three were mostly guessed
    page.js("location.hash = '#/text'")
    page.until("document.querySelectorAll('#text .tok').length > 20")
    pieces = page.js("return [...document.querySelectorAll('#text .tok')].map((e) => [e.textContent, e.className])")
    text, roles = "".join(piece for piece, _ in pieces), [role for piece, role in pieces for _ in piece]
    assert text.replace("↵\n", "\n").replace("⇥", "") == said["text"]
    places = [found.start() for found in re.finditer(re.escape(PARAGRAPH.replace("\n", "↵\n")), text)]
    assert len(places) >= 3, "the demo model does not repeat any more: choose another paragraph"
    width = len(PARAGRAPH) + 1
    shares = [sum("accepted" in role for role in roles[place:place + width]) / width for place in places[:3]]
    print(f"\naccepted characters of copies one to three: {shares}")
    assert min(shares[1:]) > 0.6, shares
    assert page.errors() == []


def test_stop_ends_the_text_in_the_engine(page: Page, demo: str) -> None:
    page.open(demo)
    before = counters(demo)
    ask(page, "def f(", ended=0, max_tokens=3000, temperature=1, seed=3)
    page.until("document.querySelector('#chat-answer .lane').textContent.length > 20", 60)
    page.js("document.querySelector('#chat-stop').click()")
    page.until("document.querySelector('#chat-answer [data-ended=stopped]') !== null")
    page.until("[...document.querySelectorAll('.facts dd')].some((e) => e.textContent === 'cancelled')", 30)
    after = counters(demo)
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    assert after["cancelled"] == before.get("cancelled", 0) + 1
    assert page.metrics()["completion_tokens"] == after["generation_tokens_total"] - before["generation_tokens_total"] < 3000
    assert page.js("return document.querySelector('#chat-stop').disabled") and page.errors() == []


def test_a_race_off_against_on(page: Page, demo: str) -> None:
    page.open(demo)
    ask(page, QUESTION, "chat-race", ended=2, temperature=0.7, seed=11, max_tokens=48)
    assert page.js("return document.querySelector('#chat-result').dataset.same") == "true"
    assert len(page.js("return [...document.querySelectorAll('#chat-answer .lane')].map((e) => e.textContent)")) == 2
    page.until("document.querySelector('body > nav a[aria-current]').dataset.view === 'race'", 30)
    assert page.until("document.querySelector('#race-result')?.dataset.same", 60) == "true", "it starts by itself"
    assert page.js("return document.querySelector('main').getBoundingClientRect().top") < 300, "where it can be seen"
    assert "48 tokens" in page.js("return document.querySelector('#race-result').textContent") and "Stop" in page.text()
    shot(page, "live-race")
    page.js("document.querySelector('body > nav a[data-view=status]').click()")
    page.until("document.querySelector('main .verdict')?.textContent.startsWith('Speculation')")
    assert "yes: all 48 tokens equal" in page.text(), "and so says the status of the one with guesses"
    assert page.errors() == []


def test_a_race_waits_for_who_wants_less_motion_and_says_what_its_marks_mean(page: Page) -> None:
    with serving(letters(), "ngram:min=1,max=2", depth=3) as running:
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [still]})
        page.open(running.url)
        ask(page, "abab", "chat-race", ended=2, max_tokens=12, seed=1)
        page.until("document.querySelector('body > nav a[aria-current]').dataset.view === 'race'", 30)
        page.js("return new Promise((done) => setTimeout(done, 300))")
        assert page.js("return [document.querySelector('#race-result').textContent, window.scrollY]") == ["", 0]
        for legend in page.js("return [...document.querySelectorAll('.legend')].map((list) => list.textContent)"):
            assert all(role in legend for role in ("accepted", "correction", "bonus", "plain", "prefill"))
        assert page.js("return document.querySelectorAll('.legend').length") == 2, "the chat's and the race's"
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        running.listener.handle_exit(signal.SIGTERM, None)


def test_a_race_under_another_rule_accuses_nobody(page: Page) -> None:
    from draftproof.drafters.model import ModelDrafter

    with serving(letters(), lambda: ModelDrafter(letters()), depth=3, rule="ratio") as running:
        page.open(running.url)
        ask(page, "abab", "chat-race", ended=2, temperature=1, seed=2, max_tokens=24)
        told = page.until("document.querySelector('#chat-result').textContent")
        assert page.js("return document.querySelector('#chat-result').dataset.same") == "false", "choose another seed"
        assert "The texts differ, as they may: rule ratio keeps the distribution, not the text." in told
        page.until("document.querySelector('#race-result')?.dataset.same", 60)
        page.show("status", r=1)
        assert "NO:" not in page.text()
        running.listener.handle_exit(signal.SIGTERM, None)


@pytest.fixture
def keyed() -> Iterator[Running]:
    keys = tuple(Key.of(line, 1) for line in ("alice alice-secret", "bob bob-secret", "eye eye-secret trace", "root root-secret admin"))
    with serving(letters(), "ngram:min=1,max=2", depth=3, keys=keys) as running:
        yield running
        running.listener.handle_exit(signal.SIGTERM, None)           # the page is still open


def enter(page: Page, url: str, key: str) -> None:
    page.open(url)
    page.until("document.querySelector('#key') !== null")
    page.js("document.querySelector('#key').value = arguments[0]; document.querySelector('#key-send').click()", key)


def test_keys_and_whose_texts_are_shown(page: Page, keyed: Running) -> None:
    for name in ("alice", "bob"):
        body = {"model": "letters", "prompt": "abab", "max_tokens": 12, "seed": 1, "ignore_eos": True}
        asked(keyed.url + "/v1/completions", body, f"{name}-secret")
    enter(page, keyed.url, "wrong-secret")
    page.until("document.body.innerText.includes('does not know this key')")
    enter(page, keyed.url, "alice-secret")
    page.until("document.querySelectorAll('select[aria-label=request] option').length === 1", 30)
    assert page.js("return [localStorage.length, sessionStorage.length, document.cookie, location.href]") == [0, 0, "", f"{keyed.url}/"]
    page.show("text", r=0)
    assert "withheld" not in page.text() and "▒" not in page.js("return document.querySelector('#text').textContent")
    page.show("status")
    ask(page, "ab", max_tokens=9, seed=2)
    page.until("document.querySelectorAll('select[aria-label=request] option').length === 2", 30)
    page.js("document.querySelector('#server-switch').click()")
    page.until("document.querySelector('#notice').textContent.includes('marked admin')")
    enter(page, keyed.url, "eye-secret")
    page.until("document.querySelectorAll('select[aria-label=request] option').length === 3", 30)
    for number in range(3):
        for view in ("status", "text", "rounds", "tree", "acceptance", "race", "gantt", "verification", "compare"):
            page.show(view, r=number, round=1)
            assert page.js("return document.querySelector('main').innerText.length") > 40 and "cannot show" not in page.text()
        page.show("text", r=number)
        assert set(page.js("return document.querySelector('#text').textContent")) <= set("▒·0123456789")
    assert not [error for error in page.errors() if "401" not in error and "403" not in error]


def test_the_switch_of_the_server(page: Page, keyed: Running) -> None:
    enter(page, keyed.url, "root-secret")
    state = "document.querySelector('#server-state')?.textContent"
    page.until(f"{state}?.startsWith('Speculation is on: drafter ngram')")
    page.js("document.querySelector('#server-switch').click()")
    page.until(f"{state}.startsWith('Speculation is off')")
    page.js("document.querySelector('#server-switch').click()")
    page.until(f"{state}.startsWith('Speculation is on')")
    page.js("document.querySelector('input[name=cap]').value = '2'; document.querySelector('#server-cap').click()")
    page.until(f"{state}.includes('at most 2')")
    assert keyed.server.depth_cap == 2
    page.js("document.querySelector('#server-uncap').click()")
    page.until(f"!{state}.includes('at most')")
    assert keyed.server.depth_cap is None


def test_a_switch_thrown_elsewhere_is_shown(page: Page) -> None:
    """By the command line, or by another page: what stood there would be said to be on while it is off."""
    with serving(letters(), "ngram:min=1,max=2", depth=3) as running:
        page.open(running.url)
        state = "document.querySelector('#server-state')?.textContent"
        page.until(f"{state}?.startsWith('Speculation is on')", 30)
        body, head = json.dumps({"enabled": False}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(running.url + "/draftproof/speculation", body, head, method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        page.until(f"{state}.startsWith('Speculation is off')", 15)
        assert page.js("return document.querySelector('#server-switch').textContent") == "Switch on"
        running.listener.handle_exit(signal.SIGTERM, None)


def test_many_tokens_cost_one_flush_a_frame(page: Page) -> None:
    endless = letters(context=1 << 20)
    endless.eos_ids = ()                                    # it writes until the page has shown some, however fast either is
    with serving(endless, "ngram:min=1,max=2", depth=3, config=ServeConfig(port=0)) as running:
        page.open(running.url)
        page.until("document.querySelector('#chat-send') !== null", 30)
        page.js("""window.perFrame = []; let now = 0;
            const tick = () => { window.perFrame.push(now); now = 0; requestAnimationFrame(tick); }; requestAnimationFrame(tick);
            const append = Element.prototype.append;
            Element.prototype.append = function (...parts) {
              if (this.classList.contains('lane')) now += 1;
              return append.apply(this, parts);
            };""")
        ask(page, "abab", ended=0, max_tokens=500_000, seed=1)
        page.until("window.perFrame.reduce((sum, n) => sum + n, 0) >= 40", 60)
        flushes, shown = page.js("return [window.perFrame, document.querySelectorAll('#chat-answer .lane .tok').length]")
        page.js("document.querySelector('#chat-stop').click()")
        page.until("document.querySelector('#chat-answer [data-ended=stopped]') !== null")
        assert max(flushes) == 1, "what arrives within a frame is shown at once"
        assert shown > 2 * sum(flushes), "and much does"
        running.listener.handle_exit(signal.SIGTERM, None)


def test_the_page_finds_a_server_that_was_started_again(page: Page) -> None:
    def write(url: str, seed: int) -> None:
        asked(url + "/v1/completions", {"model": "letters", "prompt": "abab", "max_tokens": 12, "seed": seed, "ignore_eos": True})

    with serving(letters(), "ngram:min=1,max=2", depth=3) as first:
        page.open(first.url)
        write(first.url, 1)
        page.until("document.querySelector('[data-metric=seed]')?.dataset.value === '1'", 30)
        first.listener.handle_exit(signal.SIGTERM, None)
    page.until("document.querySelector('#notice').textContent.includes('trying again')", 30)
    with serving(letters(), "ngram:min=1,max=2", depth=3, config=ServeConfig(port=int(first.url.rpartition(":")[2]))) as second:
        page.until("document.querySelector('#notice').hidden", 30)
        write(second.url, 2)
        page.until("document.querySelector('[data-metric=seed]')?.dataset.value === '2'", 30)
        assert page.js("return document.querySelectorAll('select[aria-label=request] option').length") == 2
        ask(page, "ab", max_tokens=9, seed=3)
        finished(page, 9)
        page.until("document.querySelector('#chat-answer .tok') !== null")      # though its name stood for another text before
        second.listener.handle_exit(signal.SIGTERM, None)


@pytest.mark.parametrize("form", ["light", "dark", "phone"])
def test_axe_finds_nothing_serious_live(page: Page, demo: str, form: str) -> None:
    page.size(390 if form == "phone" else 1200, 844 if form == "phone" else 1100, dark=form == "dark")
    try:
        page.open(demo)
        ask(page, QUESTION, temperature=0, seed=1, max_tokens=TOKENS)
        finished(page, TOKENS)
        page.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": gzip.decompress(AXE.read_bytes()).decode()})
        assert page.js(SERIOUS) == []
        assert page.js("return document.documentElement.scrollWidth") <= (390 if form == "phone" else 1200)
        shot(page, f"live-{form}")
    finally:
        page.size(1200, 900)

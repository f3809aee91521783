"""The page in a real browser, view by view: what each says of traces that are unlike the usual ones."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import Page, chromium, serving
from test_browser import AXE, SERIOUS

from draftproof.trace import figures
from draftproof.trace.events import (
    Alternative,
    Event,
    NodeRecord,
    PrefillDone,
    RequestDone,
    RequestStarted,
    RoundDone,
    Times,
    TokenRecord,
    TraceStarted,
)
from draftproof.trace.judged import judgement
from draftproof.trace.sinks import read_trace, to_json
from draftproof.view.bundle import LESSON

pytestmark = pytest.mark.browser
P, Q = [0.4, 0.3, 0.2, 0.1], [0.1, 0.5, 0.3, 0.1]
WORDS = ("zero", "one", "two", "three")
QUICK = Times(0.001, 0.004, 0.0, 0.0)
CUT_OFF = """const box = document.querySelector('svg.chart').getBoundingClientRect();
    return [...document.querySelectorAll('svg.chart text')].filter((text) => {
      const own = text.getBoundingClientRect();
      return own.left < box.left || own.right > box.right; }).map((text) => text.textContent)"""
VERDICT = "return document.querySelector('main .verdict').textContent"
LIMITS = """const [rows, nodes] = arguments;
    return import('/verification.js').then(({ refusals }) => {
      const { limits, left } = refusals(rows, nodes);
      return [limits, [...left.values()]]; })"""


def header(vocabulary: tuple[str, ...] | None = WORDS, target: str = "t") -> TraceStarted:
    return TraceStarted(1, target, "model", "match", "4", {}, vocabulary)


def request(rounds: list[RoundDone], name: str = "r0", rule: str = "match", finish: Any = "length") -> list[Event]:
    """A request around its rounds, which take its name and 10 ms each."""
    timed = [RoundDone(name, n, 0.01 * (n + 2), 1, 4 + n, one.depth, one.drafter, "", "", one.nodes, one.tokens, one.text, one.times)
             for n, one in enumerate(rounds)]
    return [RequestStarted(name, 0.0, 3, 0, {"temperature": 1.0}, 1, 0, rule=rule),
            PrefillDone(name, 0.01, 0.01, 1, TokenRecord(0, "prefill"), WORDS[0]), *timed,
            RequestDone(name, 0.01 * (len(rounds) + 2), finish, 1 + sum(len(one.tokens) for one in rounds), {})]


def around(nodes: tuple[NodeRecord, ...], tokens: tuple[TokenRecord, ...], text: str = "", depth: int | None = None,
           times: Times = QUICK, drafter: str = "model") -> RoundDone:
    return RoundDone("", 0, 0.0, 1, 0, len(nodes) if depth is None else depth, drafter, "", "", nodes, tokens, text, times)


def tree(times: Times) -> RoundDone:
    """Three levels of three guesses, of which the first two levels stood."""
    nodes = tuple(NodeRecord(i % 3, 3 * (i // 3 - 1) if i > 2 else -1, "discarded" if i % 3 else "accepted" if i < 6 else "rejected")
                  for i in range(9))
    return around(nodes, (*2 * [TokenRecord(0, "accepted")], TokenRecord(3, "correction")), "zerozerothree", 3, times)


def judged(coins: tuple[float, ...], fates: tuple[Any, ...], q: list[float] | None) -> RoundDone:
    """Tokens 1, 2, … were guessed at one place."""
    nodes = tuple(NodeRecord(i, -1, fate, P[i], q and q[i], None, coin) for i, (fate, coin) in enumerate(zip(fates, coins, strict=True), 1))
    stood = fates.index("accepted") + 1 if "accepted" in fates else 0
    laws = [tuple(Alternative(i, chance) for i, chance in enumerate(law or [])) for law in (P, q)]
    return around(nodes, (TokenRecord(stood, "accepted" if stood else "correction", P[stood], None, *laws),), WORDS[stood])


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as tab:
        yield tab


@pytest.fixture
def opened(page: Page, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open the page on a trace of these events."""
    with serving({"t.jsonl": tmp_path / "t.jsonl"}) as address:
        def open_(*events: Event, at: str = "") -> Page:
            (tmp_path / "t.jsonl").write_text("".join(to_json(event) + "\n" for event in events), encoding="utf-8")
            page.open(address("t.jsonl") + at)
            return page

        yield open_
    assert page.errors() == []


JUDGED = [judged((0.5,), ("rejected",), None), judged((0.5, 0.2), ("discarded", "accepted"), None),
          judged((0.9, 0.95), ("rejected", "rejected"), Q), judged((0.99,), ("rejected",), Q), judged((0.1,), ("accepted",), [0.1] * 4)]


def test_coins_are_shown_against_the_limits_that_decided(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request(JUDGED, rule="ratio"))
    for n, told in enumerate(("p = 0.300", "limit of guess 2 = 0.286", *2 * ["min(1, p/q) = 0.600"], "min(1, p/q) = 1.000")):
        page.show("verification", r=0, round=n, token=0)
        assert told in page.js("return document.querySelector('svg.chart').textContent"), n
        assert page.js(CUT_OFF) == []
    page.show("verification", r=0, round=1, token=0)
    rows = page.js("return [...document.querySelectorAll('main table')[0].rows].map((row) => row.innerText.split('\\t').join(' '))")
    assert rows[1:] == ["1 one 0.500 0.300 discarded", "2 two 0.200 0.286 accepted"] and "guess 2, two, which stood" in page.text()


def test_what_is_not_told_of_q_bounds_the_residual(opened: Callable[..., Page]) -> None:
    one = judged((0.9,), ("rejected",), Q)
    token = one.tokens[0]._replace(draft_alternatives=tuple(Alternative(i, Q[i]) for i in (1, 2)))
    page = opened(header(), *request([replace(one, tokens=(token,))], rule="ratio"))
    page.show("verification", r=0, round=0, token=0)
    cells = page.js("return [...document.querySelectorAll('main tbody tr')].map((row) => row.lastChild.textContent)")
    assert cells == ["≤ 0.400", "0.000", "0.000", "≤ 0.100"] and page.js("return document.querySelectorAll('.bar-of.most').length") == 2


@pytest.mark.parametrize("stood", [True, False])
def test_block_and_lossy_are_explained_by_their_own_rules(opened: Callable[..., Page], stood: bool) -> None:
    one = judged((0.9,), ("accepted" if stood else "rejected",), Q)
    page = opened(header(), *request([one], rule="block"), *request([one], "r1", "lossy-typical"))
    page.show("verification", r=0, round=0, token=0)
    assert "min(1, p/q)" not in page.text() and "lower bound" not in page.text() and page.js("return !document.querySelector('svg.chart')")
    assert page.js("return document.querySelector('main tbody tr').innerText.split('\\t')") == ["1", "one", "0.900", one.nodes[0].fate]
    page.show("verification", r=1, round=0, token=0)
    assert "whatever was guessed" not in page.text() and "typical" in page.text() and "0.09" in page.text()
    assert ("one stood, with p = 0.300" if stood else "one (p = 0.300) did not stand") in page.text()
    assert ("log p + g" in page.text()) == (not stood)


def test_the_page_s_limits_are_the_chart_s(opened: Callable[..., Page]) -> None:
    page, started = opened(header(), *request(JUDGED, rule="ratio")), request([], rule="ratio")[0]
    assert isinstance(started, RequestStarted)
    for record in JUDGED:
        found = judgement(started, record, 0)
        rows = [{"token": one.token, "p": one.p, "q": one.q} for one in found.candidates]
        nodes = [{"token": node.token, "q": node.q} for node in record.nodes]
        limits, left = page.js(LIMITS, rows, nodes)
        assert limits == pytest.approx([one.limit for one in found.guesses]) and left == pytest.approx(found.left)


def test_the_page_and_the_chart_count_costs_alike(opened: Callable[..., Page]) -> None:
    plain = around((), (TokenRecord(3, "plain"),), "three", times=Times(0.0, 0.01, 0.0, 0.0))
    events = [header(), *request([plain] * 4 + [tree(Times(0.006, 0.013, 0.0, 0.0))] * 4)]
    found = figures.runs(events)
    (line,) = figures.payoffs(found, found)
    page = opened(*events)
    page.show("pays", r=0)
    c, row = page.js("return [...document.querySelectorAll('main input[type=range]')].slice(1, 3).map((input) => Number(input.value))")
    assert (c, row) == (0.2, 0.1) == (pytest.approx(line.c), pytest.approx(line.row))
    points = page.js("return [...document.querySelectorAll('path.hazards')].map((path) => path.getAttribute('d'))")
    heights = [float(point.split()[1]) for point in points[0][1:].split("L")]
    scale = (220 - heights[0]) / line.predicted[0][1]
    assert [(220 - height) / scale for height in heights] == pytest.approx([gain for _, gain in line.predicted])


def asked(page: Page, number: int, body: str) -> Any:
    """What the page's own functions say of a request of its trace."""
    return page.js("""return Promise.all([fetch('/t.jsonl'), ...['trace', 'speed', 'pays'].map((name) => import(`/${name}.js`))])
        .then(async ([file, ...all]) => {
          const of = Object.assign({}, ...all), trace = await new of.Trace('t').read(file.body), request = trace.requests[arguments[0]];
          return %s; })""".replace("arguments[0]", str(number)) % body)


SLOW, BARE = Times(0.006, 0.0131, 0.001, 0.0), around((), (TokenRecord(3, "plain"),), "three", times=Times(0.0, 0.009, 0.001, 0.0))
OFF, NOISY = replace(BARE, drafter="none"), Times(0.05, 0.013, 0.001, 0.0)


@pytest.mark.parametrize("kind", ["off", "bare", "scores", "load", "other load"])
def test_plain_decoding_has_one_definition(opened: Callable[..., Page], kind: str) -> None:
    """Status, Gantt, Pays? and the charts say one speed-up of one trace."""
    mine = [tree(SLOW), tree(NOISY), tree(SLOW), *([BARE] * (kind == "bare") * 4)]
    events = [header(), *request(mine), *(request([OFF] * 9, "r1", finish="cancelled") if kind == "off" else [])]
    if "load" in kind:                   # plain passes over eight texts took longer, and say nothing of a text that was alone
        dear = request([replace(OFF, times=Times(0.0, 0.09, 0.01, 0.0))] * 9, "r1", finish="cancelled")
        events += [replace(event, batch=8) if isinstance(event, RoundDone) else event for event in dear]
        events += request([OFF] * 9, "r2", finish="cancelled") if kind == "load" else []
    found = figures.runs(events)
    base = figures.plain(found, found[:1])
    assert base is not None and base.measured == (kind not in ("scores", "other load"))
    assert base.seconds == pytest.approx(0.01 if base.measured else 0.013, rel=0.01)
    about, (line,) = base.estimate(found[0]), figures.payoffs(found, found[:1])
    page = opened(*events)
    assert about is not None and asked(page, 0, "of.plainOf(trace, request)") == {
        "seconds": pytest.approx(base.seconds), "measured": base.measured, "how": base.how,
        "by": {str(batch): pytest.approx(seconds) for batch, seconds in base.by.items()}}
    told = asked(page, 0, "of.estimated(trace, request)")
    assert (told["gain"], told["high"] - told["gain"]) == pytest.approx((about.gain, about.half))
    shown = asked(page, 0, "of.measured(trace, request)")
    assert [one[:2] for one in shown["points"]] == [pytest.approx([speed.depth, speed.gain]) for speed in line.measured]
    assert (shown["c"], shown["row"], shown["o"]) == pytest.approx((min(1.0, line.c), line.row, min(1.0, line.o)))
    page.show("status", r=0)
    assert f"about {about.gain:.2f}×" in page.text() and base.how in page.text() and "pays" not in page.js(VERDICT)
    page.show("gantt", r=0)
    first, whole = 0.01, 0.01 * (len(mine) + 1)
    assert f"about {1e3 * (first + (whole - first) * about.gain):.1f} ms" in page.text() and base.how in page.text()


def raced(gain: float, number: int, heat: float = 1.0, rule: str = "match", other: bool = False) -> list[Event]:
    """The same request without guesses and with them, so many times as fast."""
    one = around((NodeRecord(3, -1, "accepted"),), (TokenRecord(3, "accepted"), TokenRecord(2 if other else 3, "bonus")), "threethree")
    pair = [*request([OFF] * 4, f"off{number}"), *request([one] * 2, f"on{number}", rule)]
    ends = {0: 0.05, 1: 0.05 / gain}
    for place, event in enumerate(pair):
        if isinstance(event, RequestStarted):
            pair[place] = replace(event, sampling={"temperature": heat}, seed=number)
        elif isinstance(event, RoundDone) and event.round == (3 if place < 7 else 1):
            pair[place] = replace(event, at_s=ends[place >= 7])
    return pair


@pytest.mark.parametrize(("gains", "told"), [
    ([2.0], "Speculation is on: 2.00 times the speed of plain decoding in this pair of runs; whether it pays, one pair does not tell"),
    ([2.0] * 5, "whether it pays, 5 pairs do not tell"), ([2.0] * 6, "Speculation is on and pays: 2.00 times the speed"),
    ([0.5] * 6, "Speculation is on and costs time: 0.50 times"), ([0.5, 2.0] * 4, "no certain gain or loss; 0.50 in this one"),
])
def test_a_gain_is_claimed_only_where_pairs_show_it(opened: Callable[..., Page], gains: list[float], told: str) -> None:
    events = [event for number, gain in enumerate(gains) for event in raced(gain, number)]
    cold = [event for number in range(6) for event in raced(9.0, 10 + number, heat=0.0)]
    page = opened(header(), *events, *cold)
    page.show("status", r=1)
    assert told in page.js(VERDICT), page.js(VERDICT)
    assert f"{len(gains)} of drafter model, rule match, temperature 1: median" in page.text()


def test_a_request_without_a_pair_is_given_no_other_s_speed(opened: Callable[..., Page]) -> None:
    alone = request([tree(SLOW)] * 3, "alone", finish="cancelled")
    page = opened(header(), *(event for number in range(6) for event in raced(9.0, number)), *alone)
    page.show("status", r=12)
    assert "9.00 times" not in page.js(VERDICT) and " about " in page.js(VERDICT)
    assert "6 of drafter model, rule match, temperature 1: median 9.00×" in page.text()


@pytest.mark.parametrize(("rule", "promise"), [("ratio", "keeps the distribution"), ("lossy-typical", "is lossy"), ("match", "DIFFER")])
def test_only_rule_match_promises_the_text(opened: Callable[..., Page], rule: str, promise: str) -> None:
    page = opened(header(), *raced(2.0, 0, rule=rule, other=True))
    page.show("status", r=1)
    assert ("NO: the run" in page.text()) == (rule == "match")
    page.show("race", r=1)
    page.js("document.querySelector('#race-end').click()")
    said = page.js("return document.querySelector('#race-result').textContent")
    assert promise in said and ("DIFFER" in said) == (rule == "match") and "2.00 times as fast" in said


def test_the_status_of_what_never_guessed(opened: Callable[..., Page]) -> None:
    rests, none = around((), (TokenRecord(3, "plain"),), "three"), OFF
    events = [header(), *request([], "first", finish="stop"), *request([rests] * 3, "rests"), *request([none] * 3, "off")]
    reason = "auto: no draft is expected to pay for its time"
    page = opened(*(replace(event, reason=reason) if isinstance(event, RoundDone) and event.request == "rests" else event
                    for event in events))
    for number, told in enumerate(("The text ended at its first token", "Speculation is on (model), but it never guessed: no draft",
                                   "Speculation is off for this text")):
        page.show("status", r=number)
        assert told in page.js(VERDICT)
    page.show("status", r=0)
    assert "–×" not in page.text() and "speed-up\nnot known" in page.text()


def test_great_depths_have_few_marks(opened: Callable[..., Page]) -> None:
    nodes = tuple(NodeRecord(1, i - 1, "rejected" if not i else "discarded") for i in range(128))
    page = opened(header(), *request([around(nodes, (TokenRecord(2, "correction"),), "two")] * 3))
    page.show("pays", r=0)
    marks = page.js("return [...document.querySelectorAll('svg.chart text[y=\"238\"]')].map((text) => Number(text.textContent))")
    assert marks == list(range(0, 129, 16))


def test_worths_of_guesses_can_be_read(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request(JUDGED))
    page.show("learn")
    page.until("document.querySelector('main svg.fit text') !== null")
    text, bar = page.js("""const all = [...document.querySelectorAll('main svg.fit')].at(-1), box = (e) => e.getBoundingClientRect();
        const labels = [...all.querySelectorAll('text')].map(box);
        return [labels.map(({ left, top, right }) => [left, top, right]), box(all.querySelector('.bar')).bottom]""")
    assert all(top >= bar - 4 for _, top, _ in text) and all(one[2] + 4 < two[0] for one, two in pairwise(text))


def test_words_are_those_of_the_request_s_own_model(opened: Callable[..., Page]) -> None:
    """Two traces in one file: the second model's words are its own, and a header without words has those of the same target."""
    one = around((NodeRecord(1, -1, "rejected"),), (TokenRecord(2, "correction"),), "")
    other = ("null", "eins", "zwei", "drei")
    headers = header(), header(other, "u"), header(None), header(None, "v")
    page = opened(*(event for one_ in headers for event in (one_, *request([one]))))
    for number, words in enumerate((("one", "two"), ("eins", "zwei"), ("one", "two"), ("#1", "#2"))):
        page.show("tree", r=number, round=0)
        shown = page.js("return [...document.querySelectorAll('main table')].map((table) => table.rows[1].innerText)")
        assert words[0] in shown[0] and words[1] in shown[1]


def test_a_long_text_keeps_the_place_of_the_replay_and_is_printed_whole(opened: Callable[..., Page]) -> None:
    one = around((NodeRecord(1, -1, "accepted"),), (TokenRecord(1, "accepted"), TokenRecord(2, "bonus")), "onetwo")
    page = opened(header(), *request([one] * 1500))
    page.show("text", r=0)
    page.js("const at = document.querySelector('#replay-range'); at.value = 100; at.dispatchEvent(new Event('input'))")
    ahead = "[...document.querySelectorAll('#text .tok')].filter((e) => Number(e.dataset.round) >= 100)"
    page.until(f"{ahead}.every((e) => e.classList.contains('future'))")
    page.js("window.scrollTo(0, document.body.scrollHeight)")
    filled = "document.querySelector('#text .block:{}-child .tok') !== null"
    page.until(filled.format("last"))
    page.js("window.scrollTo(0, 0)")
    page.until(f"{filled.format('first')} && !({filled.format('last')})")
    assert page.js(f"return {ahead}.every((e) => e.classList.contains('future'))")
    page.js("window.dispatchEvent(new Event('beforeprint'))")
    assert page.js("return document.querySelectorAll('#text .tok').length") == 1 + 2 * 1500
    assert page.js(f"return {ahead}.every((e) => e.classList.contains('future'))")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    for name in ("footer", "body > nav", "#controls", "button"):
        assert page.js("return getComputedStyle(document.querySelector(arguments[0])).display", name) == "none"
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    page.js("window.dispatchEvent(new Event('afterprint'))")
    page.until(f"!({filled.format('last')})")


def test_a_wide_drawing_is_scrolled_by_keys(opened: Callable[..., Page]) -> None:
    from selenium.webdriver.common.keys import Keys

    nodes = tuple(NodeRecord(1, i - 1, "rejected" if not i else "discarded") for i in range(12))
    page = opened(header(), *request([around(nodes, (TokenRecord(2, "correction"),), "two")] * 3))
    page.show("tree", r=0, round=1)
    page.js("document.querySelector('main .scroll').focus()")
    page.keys(Keys.ARROW_RIGHT)
    assert page.until("document.querySelector('main .scroll').scrollLeft > 0 && document.activeElement.className === 'scroll'")
    assert page.js("return document.querySelector('#replay-range').value") == "2"
    page.js("document.activeElement.blur()")
    page.keys(Keys.ARROW_RIGHT)
    page.until("document.querySelector('#replay-range').value === '3'")


def test_an_address_beyond_the_trace_is_told(opened: Callable[..., Page]) -> None:
    events = header(), *request(JUDGED)
    told = "return document.querySelector('#notice').hidden ? '' : document.querySelector('#notice').textContent"
    assert "names request 99; this trace has 1" in opened(*events, at="#/tree?r=99&round=1").js(told)
    assert opened(*events, at="#/tree?r=0&round=4").js(told) == ""
    page = opened(*events, at="#/nosuch?r=0&round=4")
    assert "names the view nosuch" in page.js(told) and page.js("return document.title").startswith("Status")


def test_numbers_that_are_none_change_no_text(opened: Callable[..., Page]) -> None:
    token = TokenRecord(1, "plain", 0.5, float("nan"))
    page = opened(header(None), *request([around((), (token,), "[NaN,\"a:NaN,\"]")]))
    page.show("text", r=0)
    assert page.js("return document.querySelector('#text').textContent").endswith("[NaN,\"a:NaN,\"]")
    page.js("document.querySelectorAll('#text .tok')[1].click()")
    assert "–" in page.js("return document.querySelector('#token-facts').textContent")


def test_what_is_copied_is_the_text_without_its_marks(opened: Callable[..., Page]) -> None:
    words = ("zero\n", "\tone\n\n", "↵.", "three")
    one = around((NodeRecord(1, -1, "accepted"),), (TokenRecord(1, "accepted"), TokenRecord(2, "bonus")), words[1] + words[2])
    page = opened(header(words), *request([one] * 450))
    page.show("text", r=0)
    page.js("window.dispatchEvent(new Event('beforeprint'))")           # all blocks of the text are there
    copy = """const range = document.createRange(), marked = document.getSelection(), data = new DataTransfer();
        range.selectNodeContents(document.querySelector(arguments[0]));
        marked.removeAllRanges();
        marked.addRange(range);
        const event = new ClipboardEvent('copy', { clipboardData: data, bubbles: true, cancelable: true });
        (range.commonAncestorContainer.parentElement ?? document.body).dispatchEvent(event);
        return [event.defaultPrevented, data.getData('text/plain')]"""
    taken, text = page.js(copy, "#text")
    assert taken and text == "zero\n" + 450 * "\tone\n\n↵."
    assert page.js(copy, "main") == [False, ""], "what is more than the text is copied as it is"


def test_the_address_names_what_is_compared_and_counted(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request(JUDGED), *request(JUDGED, name="r1"), *request(JUDGED, name="r2"))
    pick = """const select = document.querySelector(`select[aria-label="${arguments[0]}"]`);
        select.value = arguments[1]; select.dispatchEvent(new Event('change'))"""
    value = "document.querySelector('select[aria-label=\"{}\"]')?.value === '{}'"
    for view, name, chosen, first in (("compare", "request to compare with", "2", "0"), ("acceptance", "rounds of", "drafter", "request")):
        page.show(view, r=1)
        page.until(value.format(name, first))
        page.js(pick, name, chosen)
        page.until(value.format(name, chosen))
        where = page.js("return location.hash")
        assert page.js(f"return document.querySelector('body > nav a[data-view={view}]').hash") == where
        page.open(page.js("return location.href"))
        page.until(value.format(name, chosen))
        assert page.js("return document.querySelector('select[aria-label=request]').value") == "1"
    page.show("acceptance", r=1)
    page.js("location.hash = '#/acceptance?r=1&of=nothing'")
    page.until(value.format("rounds of", "request"))


def test_a_printed_page_names_its_file_and_request(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request(JUDGED), *request(JUDGED, name="r1"))
    page.show("status", r=1)
    shown = "const e = document.querySelector('#printed'); return getComputedStyle(e).display === 'none' ? '' : e.textContent"
    assert page.js(shown) == ""
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert page.js(shown).startswith("t.jsonl · r1 · model")
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_drawn_tree_has_a_legend(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request(JUDGED))
    page.show("tree", r=0, round=0)
    assert all(f"{glyph} {name}" in page.text() for glyph, name in (("■", "accepted"), ("×", "rejected"), ("·", "discarded"),
                                                                    ("→", "correction"), ("+", "bonus")))


def test_lines_of_rounds_stand_in_their_order_however_they_are_scrolled(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request(JUDGED * 40))
    page.show("rounds", r=0, round=0)
    numbers = "[...document.querySelectorAll('#rounds .row')].map((row) => Number(row.firstChild.textContent))"
    for top, first in ((3000, 88), (2700, 78), (2850, 83)):
        page.js(f"document.querySelector('#rounds').scrollTop = {top}")
        page.until(f"Math.min(...{numbers}) === {first}")
        shown = page.js(f"return {numbers}")
        assert shown == list(range(shown[0], shown[0] + len(shown)))


def test_the_whole_time_of_a_text_is_told_and_its_slowest_rounds(opened: Callable[..., Page]) -> None:
    slow = around((NodeRecord(1, -1, "rejected"),), (TokenRecord(2, "correction"),), "two", times=Times(0.001, 0.004, 0.003, 0.001))
    started, _, *rest = request([*JUDGED, slow])
    page = opened(header(), started, PrefillDone("r0", 0.01, 0.008, 1, TokenRecord(0, "prefill"), WORDS[0]), *rest)
    page.show("gantt", r=0, round=0)
    rows = page.js("return [...document.querySelectorAll('main tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))")
    assert [row[:2] for row in rows] == [["waiting", "0.0020"], ["prefill", "0.0080"], ["draft", "0.0060"], ["score", "0.0240"],
                                         ["verify", "0.0030"], ["other", "0.0010"], ["between rounds", "0.0260"], ["the whole", "0.0700"]]
    assert sum(float(row[2].removesuffix(" %")) for row in rows[:-1]) == pytest.approx(100, abs=0.3) and rows[-1][2] == "100.0 %"
    assert rows[6][3] == "4.3 ms"
    assert "the upright line is where the replay stands" in page.text()
    page.js("document.querySelector('#slowest a').click()")
    page.until("document.querySelector('.row[aria-current] .num')?.textContent === '5'")
    assert page.js("return [...document.querySelectorAll('.head .num')].map((cell) => cell.textContent)") == [
        "round", "stood", "draft", "score", "verify", "other"]
    row = page.js("return [...document.querySelectorAll('.row[aria-current] .num')].map((cell) => cell.textContent)")
    assert row == ["5", "0/1", "1.0 ms", "4.0 ms", "3.0 ms", "1.0 ms"]


def test_the_marks_of_a_histogram_are_what_they_say(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request([around((NodeRecord(1, -1, "rejected"),), (TokenRecord(3, "correction"),), "three")] * 3))
    page.show("acceptance", r=0)
    marks = page.js("""return [...document.querySelectorAll('svg.chart')[1].querySelectorAll('line.grid')].map((line) =>
        [Number(line.nextSibling.textContent), Number(line.getAttribute('y1'))])""")
    (zero, ground), (most, top) = marks[0], marks[-1]
    assert zero == 0 and most >= 3 and [y for _, y in marks] == [pytest.approx(ground - (ground - top) * mark / most) for mark, _ in marks]


def test_what_cannot_be_seen_is_named_and_marks_do_not_pile_up(opened: Callable[..., Page]) -> None:
    words = ("zero", "a\U000e0041", "\u3164b", "c\u180e", "d" + "\u0301" * 40, "👩\u200d👧\ufe0f", "e\u0301\u0323")
    rounds = [around((NodeRecord(i, -1, "rejected"),), (TokenRecord(i, "correction"),), words[i]) for i in range(1, len(words))]
    page = opened(header(words), *request(rounds))
    page.show("text", r=0)
    text = page.js("return document.querySelector('#text').textContent")
    for named in ("a⟨U+E0041⟩", "⟨U+3164⟩b", "c⟨U+180E⟩", "d\u0301\u0301\u0301\u0301⟨U+0301⟩", words[5], words[6]):
        assert named in text
    page.show("tree", r=0, round=3)
    assert "\u0301" * 5 not in page.text()


@pytest.mark.parametrize("width", [320, 360])
def test_the_replay_fits_a_small_screen(opened: Callable[..., Page], width: int) -> None:
    page = opened(header(), *request([BARE]))
    page.size(width, 700)
    try:
        beyond = page.js("""return [...document.querySelectorAll('footer *')]
            .filter((one) => one.getBoundingClientRect().right > innerWidth).map((one) => one.outerHTML.slice(0, 60))""")
        assert beyond == [] and page.js("return document.querySelector('#replay-range').clientWidth") >= 60
    finally:
        page.size(1200, 900)


def test_costs_beyond_the_sliders_are_told_as_measured(opened: Callable[..., Page]) -> None:
    plain = around((), (TokenRecord(3, "plain"),), "three", times=Times(0.0, 0.01, 0.0, 0.0))
    dear = around((NodeRecord(3, -1, "accepted"),), (TokenRecord(3, "accepted"), TokenRecord(3, "bonus")), "threethree",
                  times=Times(0.025, 0.01, 0.0, 0.0))
    page = opened(header(), *request([plain] * 4 + [dear] * 4))
    page.show("pays", r=0)
    assert "acceptance 100.0 %" in page.text() and "a guess costs 2.500 plain passes" in page.text()


def test_costs_that_no_time_tells_are_said_to_be_an_example(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request([replace(tree(Times(0.0, 0.0, 0.0, 0.0)), drafter="model")] * 4))
    page.show("pays", r=0)
    assert "the costs are an example" in page.text() and "a guess costs" not in page.text()


def test_a_label_is_cut_between_characters(opened: Callable[..., Page]) -> None:
    long = around((NodeRecord(1, -1, "rejected"),), (TokenRecord(1, "correction"),), "x")
    page = opened(header(("zero", "x" * 39 + "🚀🚀")), *request([long]))
    page.show("tree", r=0, round=0)
    assert "x" * 39 + "…" in page.text() and "U+D83D" not in page.text()


def test_a_chain_of_drafters_is_one_drafter_whichever_part_guessed_last(opened: Callable[..., Page]) -> None:
    guess = around((NodeRecord(3, -1, "accepted"),), (TokenRecord(3, "accepted"), TokenRecord(3, "bonus")), "threethree", drafter="suffix")
    ends = [[guess, replace(guess, drafter="model")], [replace(guess, drafter="model"), guess]]
    events = [header(), *(event for n, rounds in enumerate(ends) for event in request(rounds, f"r{n}"))]
    events = [replace(event, drafter="suffix+model") if isinstance(event, RequestStarted) else event for event in events]
    assert [run.report.drafter for run in figures.runs(events)] == 2 * ["suffix+model"]
    page = opened(*events)
    page.show("acceptance", r=0)
    rows = page.js("return [...document.querySelectorAll('main tbody tr')].map(({cells}) => [cells[1].textContent, cells[2].textContent])")
    assert rows == [["suffix+model", "2"]]


@pytest.mark.parametrize("dark", [False, True])
def test_what_is_not_written_yet_can_be_read(opened: Callable[..., Page], dark: bool) -> None:
    rounds = [around((NodeRecord(3, -1, "accepted"),), (TokenRecord(3, "accepted"), TokenRecord(2, "bonus")), "threetwo"),
              around((NodeRecord(1, -1, "rejected"),), (TokenRecord(2, "correction"),), "two"), BARE]
    page = opened(header(), *request(rounds * 3))
    page.size(1200, 900, dark)
    try:
        page.show("text", r=0, round=1)
        page.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": gzip.decompress(AXE.read_bytes()).decode()})
        assert page.js("return document.querySelectorAll('.tok.future').length") > 3 and page.js(SERIOUS) == []
    finally:
        page.size(1200, 900)


PRINTED = """window.dispatchEvent(new Event(arguments[0]));
    const dark = [27, 31, 36], drawn = document.querySelector('canvas'), { width, height } = drawn;      // the light theme's ink
    const pen = Object.assign(document.createElement('canvas'), { width, height }).getContext('2d', { willReadFrequently: true });
    pen.drawImage(drawn, 0, 0);
    const { data } = pen.getImageData(0, 0, width, height);
    let found = 0;
    for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255 && dark.every((one, k) => data[i + k] === one)) found += 1;
    return [getComputedStyle(document.body).color, found > 0]"""


def test_on_paper_ink_is_dark_whatever_the_screen_shows(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request([BARE] * 4))
    page.show("gantt", r=0)
    page.js("document.querySelector('#theme').click()")
    page.until("document.documentElement.dataset.theme === 'dark'")
    page.js("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.js(PRINTED, "beforeprint") == ["rgb(27, 31, 36)", True]
    assert page.js(PRINTED, "afterprint") == ["rgb(232, 234, 237)", False]


def test_on_paper_nothing_is_cut_off(opened: Callable[..., Page]) -> None:
    nodes = tuple(NodeRecord(1, i - 1, "rejected" if i == 0 else "discarded") for i in range(12))
    page = opened(header(), *request([around(nodes, (TokenRecord(3, "correction"),), "three")]), *raced(2.0, 0))
    page.size(760, 900)
    try:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        page.show("tree", r=0, round=0)
        assert page.js("return document.querySelector('svg.tree').getBoundingClientRect().right") <= 760
        page.show("race", r=2)
        assert page.js("return [...document.querySelectorAll('.lane')].every((lane) => getComputedStyle(lane).overflowY === 'visible')")
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        page.size(1200, 900)


@pytest.mark.parametrize("ended", [False, True])
def test_a_request_without_a_token_has_no_phases(opened: Callable[..., Page], ended: bool) -> None:
    started, *_ = request([])
    page = opened(header(), started, *[RequestDone("r0", 2.5, "error", 0, {}, "no room")] * ended)
    page.show("gantt", r=0)
    told = "It ended after 2.50 s without a token." if ended else "No token has come yet."
    assert told in page.text() and "µs" not in page.text()
    rows = page.js("return [...document.querySelectorAll('main tbody tr')].map(({cells}) => cells[0].textContent + cells[1].textContent)")
    assert rows == ["the whole2.5000"] * ended
    page.show("status", r=0)
    facts = page.js("return [...document.querySelectorAll('.facts dd')].map((one) => one.textContent)")
    assert facts[0] == "–" and "it is plain decoding itself" not in facts


def test_a_text_of_one_token_had_no_rounds_to_time(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request([]))
    page.show("gantt", r=0)
    assert "The whole took 10.0 ms: the prompt gave the only token." in page.text()


def test_a_trace_without_a_request_is_told(opened: Callable[..., Page]) -> None:
    page = opened(header())
    assert "no request" in page.js("return document.querySelector('#notice').textContent")


def test_what_another_key_wrote_is_not_blamed_on_the_trace_s_level(page: Page, tmp_path: Path) -> None:
    hidden = around((NodeRecord(-1, -1, "rejected"),), (TokenRecord(-1, "correction"),))
    lines = [to_json(event) for event in (header(), *request([hidden]))]
    lines[1] = lines[1][:-1] + ',"withheld":true}'
    (tmp_path / "t.jsonl").write_text("".join(line + "\n" for line in lines))
    with serving({"t.jsonl": tmp_path / "t.jsonl"}) as address:
        page.open(address("t.jsonl") + "#/verification?r=0&round=0")
        assert "of another key" in page.text() and "--trace-level" not in page.text()
        page.show("text", r=0)
        page.js("document.querySelectorAll('#text .tok')[1].click()")
        assert "correction" in page.js("return document.querySelector('#token-facts').textContent") and "--trace-level" not in page.text()
    assert page.errors() == []


def test_a_comparison_beyond_the_trace_is_told(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request([BARE] * 2), at="#/compare?r=0&b=7")
    assert "request 7" in page.js("return document.querySelector('#notice').textContent")


def test_every_round_tells_how_deep_it_was_and_why(opened: Callable[..., Page]) -> None:
    """Not the last one alone, which Status tells of; and what follows the place of the replay is shown as not written yet."""
    why = "auto: model, 1.49 tokens expected, 1.35× the plain rate"
    one = around((NodeRecord(1, -1, "accepted"), NodeRecord(2, 0, "rejected")), (TokenRecord(1, "accepted"), TokenRecord(3, "correction")),
                 "onethree", depth=4)
    events = [replace(event, reason=why, draft_reason="a copy ended") if isinstance(event, RoundDone) and event.round == 0 else event
              for event in request([one] * 3)]
    page = opened(header(), *events)
    page.show("tree", r=0, round=0)
    assert f"2 guesses by model, of which 1 stood. Depth granted: 4 ({why}; a copy ended)." in page.text()
    page.show("tree", r=0, round=1)
    assert "of which 1 stood. Depth granted: 4." in page.text()
    page.show("rounds", r=0, round=0)
    assert page.js("return document.querySelector('#rounds .row').title").endswith(f"depth granted: 4 ({why}; a copy ended)")
    page.show("text", r=0, round=1)
    page.js("document.querySelector('#text [data-round=\"0\"]').click()")
    assert why in page.js("return document.querySelector('#token-facts').textContent")
    page.js("[...document.querySelectorAll('main button')].find((one) => one.textContent.startsWith('Show the guesses')).click()")
    page.until("document.querySelectorAll('#text .guess').length === 3")
    future = page.js("return [...document.querySelectorAll('#text .guess')].map((one) => one.classList.contains('future'))")
    assert future == [False, False, True]


def test_the_race_of_a_place_marks_what_was_guessed_there(opened: Callable[..., Page]) -> None:
    """A tree guesses several tokens at a place, of which the drafter's winner may not be the one that stood."""
    page = opened(header(), *request([judged((0.5, 0.2), ("discarded", "accepted"), Q), judged((0.9,), ("rejected",), None)]))
    rows = """return [...document.querySelectorAll('main tbody tr')].map((row) =>
        [row.cells[0].textContent.slice(-5).trim(), row.cells[1].textContent])"""
    page.show("verification", r=0, round=0)
    assert sorted(page.js(rows)) == [["one", "discarded"], ["three", "–"], ["two", "accepted"], ["zero", "–"]]
    page.show("verification", r=0, round=1)
    assert sorted(page.js(rows)) == [["one", "rejected"], ["three", "–"], ["two", "–"], ["zero", "–"]], "and without the drafter's law"


def test_a_comparison_blames_no_text_for_its_length_and_counts_below_nothing(opened: Callable[..., Page]) -> None:
    """Tokens saved may be fewer than none: a long prompt takes several passes."""
    two = around((NodeRecord(3, -1, "accepted"),), (TokenRecord(3, "accepted"), TokenRecord(3, "bonus")), "threethree")

    def asked_for(name: str, rounds: list[RoundDone]) -> list[Event]:
        return [replace(event, passes=4) if isinstance(event, PrefillDone) else event for event in request(rounds, name)]

    page = opened(header(), *asked_for("r0", [BARE] * 8), *asked_for("r1", [two] * 4), *asked_for("r2", [BARE] * 9))
    rows = """Object.fromEntries([...document.querySelectorAll('main tbody tr')].map((row) => {
        const [name, ...values] = [...row.cells].map((cell) => cell.textContent);
        return [name, values]; }))"""
    page.show("compare", r=0, b=1)
    told = page.js(f"return {rows}")
    assert told["passes_saved"] == ["-3", "1", "– ▲ better"] and told["rounds"] == ["8", "4", "0.500 ▲ better"]
    page.show("compare", r=0, b=2)
    told = page.js(f"return {rows}")
    assert told["rounds"] == ["8", "9", "1.125"] and told["acceptance_length"] == ["1", "1", "1.000"]


@pytest.mark.parametrize("view", ["tree", "verification"])
def test_a_text_that_has_ended_waits_for_no_round(opened: Callable[..., Page], view: str) -> None:
    page = opened(header(), *request([]))
    page.show(view, r=0)
    assert "The text ended at its first token" in page.text() and "yet" not in page.js("return document.querySelector('main').textContent")


def test_names_of_requests_tell_rules_apart(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request([BARE], "r0", rule="ratio"), *request([BARE], "r0", rule="block"), *request([BARE], "r0"))
    names = page.js("return [...document.querySelectorAll('select[aria-label=request] option')].map((one) => one.textContent)")
    assert names == ["r0 · model · ratio · T 1 · 2 tokens", "r0 · model · block · T 1 · 2 tokens", "r0 · model · T 1 · 2 tokens"]


def test_the_lesson_says_what_its_passes_took(opened: Callable[..., Page]) -> None:
    page, found = opened(header(), *request([BARE])), figures.runs(read_trace(LESSON))
    guessing = next(run for run in found if run.guesses)
    base = figures.plain(found, [guessing])
    assert base is not None
    page.show("learn")
    page.until("document.querySelector('.steps') !== null")
    steps = page.js("return document.querySelector('.steps').textContent")
    assert f"One token a pass takes about {1e3 * base.seconds:.1f} ms each" in steps and "nearly" not in steps


def test_marks_that_are_colours_survive_the_reader_s_own(opened: Callable[..., Page]) -> None:
    page = opened(header(), *request([tree(SLOW)] * 4))
    forced = [{"name": "forced-colors", "value": "active"}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": forced})
    try:
        page.show("rounds", r=0, round=1)
        page.until("document.querySelector('.row[aria-current]') !== null")
        styles = page.js("return [...document.querySelectorAll('#rounds .row')].map((row) => getComputedStyle(row).outlineStyle)")
        assert styles == ["none", "solid", "none", "none"]
        page.show("pays", r=0)
        keys = page.js("return [...document.querySelectorAll('.legend .key')].map((key) => getComputedStyle(key).borderTopColor)")
        assert len(set(keys)) == len(keys) == 4
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_time_line_of_a_long_text_is_drawn_to_its_end_and_quickly(opened: Callable[..., Page]) -> None:
    """What is left out would look like time between rounds; and a pixel that is full is not filled again for every round."""
    page = opened(header(None), *request([BARE] * 45_000), *request([OFF] * 3, "r1", finish="cancelled"))
    page.js("""window.fills = 0; const fill = CanvasRenderingContext2D.prototype.fillRect;
        CanvasRenderingContext2D.prototype.fillRect = function (...box) { window.fills += 1; return fill.apply(this, box); };""")
    page.show("gantt", r=0, round=0)
    page.until("window.fills > 100")
    lanes = page.js("""const canvas = document.querySelector('canvas.gantt'), wide = canvas.width, scale = canvas.height / 218;
        const { data } = canvas.getContext('2d').getImageData(0, 0, wide, canvas.height);
        const filled = (y, at) => data[4 * (Math.round(y * scale) * wide + Math.round(at * wide)) + 3] > 0;
        return [0.2, 0.5, 0.8, 0.98].map((at) => [46, 74, 102, 130, 170].map((y) => filled(y, at)));""")
    assert lanes == [[False, True, True, False, True]] * 4, "score, verify and plain; nothing was drafted, and nothing else took time"
    assert page.js("return window.fills") < 8 * page.js("return document.querySelector('canvas.gantt').width") < 45_000

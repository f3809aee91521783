"""A/B on a running server: who writes what, that no text changes, and that planted faults are found and turned back."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from serve.serving import Running, alone, letters, serving
from serve.test_faults import Around
from serve.test_http import PROMPTS, until

from draftproof import Engine, Sampling
from draftproof.config import AbConfig, ServeConfig
from draftproof.errors import Failure
from draftproof.serve.ab import CANDIDATE, CONTROL, place
from draftproof.serve.gate import Key
from draftproof.view.server import HEADERS

NGRAM = "ngram:min=1,max=2"
WRONG, SLOW, BREAKING = (f"custom:serve.ab_drafters:{name}" for name in ("Wrong", "Slow", "Breaking"))


@contextmanager
def comparing(arms: str, *, drafter: str | None = None, wrap: Callable[[Engine], Any] = lambda engine: engine, max_batch: int = 16,
              keys: tuple[Key, ...] = (), **more: Any) -> Iterator[Running]:
    ab = AbConfig(arms, **{"minimum": 20, "wait_s": 0.0, "replay": 0.0, **more})
    first = drafter or ab.drafters[0]
    with serving(letters(), first, config=ServeConfig(port=0, ab=ab, deadline_s=20), depth=3, wrap=wrap, max_batch=max_batch, keys=keys,
                 others=[spec for spec in ab.drafters if spec != first]) as running, running.client() as client:
        running.client = lambda **more: nullcontext(client)  # type: ignore[assignment, method-assign, misc]
        yield running                                        # one client for hundreds of requests: making one takes longer than they do


def found(running: Running) -> dict[str, Any]:
    with running.client() as client:
        report: dict[str, Any] = client.get("/draftproof/ab.json").json()
    return report


def cell(report: Mapping[str, Any], arm: str, source: str = "served", name: str = "all") -> dict[str, Any]:
    return next((one for one in report["cells"] if (one["arm"], one["source"], one["class"]) == (arm, source, name)), {"requests": 0})


def ask_until(running: Running, state: str, most: int, **body: Any) -> int:
    """Requests of new users until the roll-out is in a state; how many it took."""
    for count in range(most):
        if running.server.experiment.rollout.state == state:
            return count
        running.post("/v1/completions", {"prompt": PROMPTS[count % 5], "user": f"u{count}", "max_tokens": 8, "seed": count,
                                         "ignore_eos": True, **body})
    raise AssertionError(f"not {state} after {most} requests: {running.server.experiment.rollout}, {running.server.experiment.history}")


def test_traffic_is_split_by_a_stable_hash_and_no_text_knows_of_it() -> None:
    with comparing(f"{NGRAM} vs off", share=0.5, experiment="x") as running:
        arms = {}
        for i in range(80):
            body = {"prompt": PROMPTS[i % 5], "seed": i, "max_tokens": 8, "user": f"u{i}", "metadata": {"prompt_class": f"c{i % 2}"}}
            got = running.complete(**body)
            arms[i] = CANDIDATE if got["speculation"]["state"] == "on" else CONTROL
            assert got["choices"][0]["text"] == alone(running.target, PROMPTS[i % 5], Sampling(seed=i, max_tokens=8)).text
        assert arms == {i: CANDIDATE if place("x", "", "user", f"u{i}") < 0.5 else CONTROL for i in range(80)}
        assert 27 <= Counter(arms.values())[CANDIDATE] <= 53, "half of 80, give or take three standard deviations"
        again = running.complete(prompt="a cab", user="u7", max_tokens=3)
        streamed = running.stream(prompt="bad", user="u7", max_tokens=3, stream_options={"include_usage": True})
        chat = running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "safety_identifier": "u7",
                                                     "max_tokens": 3}).json()
        for reply in (again, streamed[-1], chat):
            assert (reply["speculation"]["state"] == "on") == (arms[7] == CANDIDATE), "a user stays, whatever is asked and however"
        states = {running.complete(prompt="ab", seed=5, max_tokens=3)["speculation"]["state"] for _ in range(4)}
        assert len(states) == 1, "without a user, the same prompt and seed are of one arm"
        report = found(running)
    counted = {arm: cell(report, arm)["requests"] for arm in (CANDIDATE, CONTROL)}
    assert sum(counted.values()) == 87 and counted[CANDIDATE] >= Counter(arms.values())[CANDIDATE]
    assert sum(cell(report, arm, name=f"c{i}")["requests"] for arm in counted for i in range(2)) == 80
    mine, others = cell(report, CANDIDATE), cell(report, CONTROL)
    assert others["acceptance"]["drafted"] == 0 < mine["acceptance"]["drafted"] and mine["failed"] == others["failed"] == 0
    for time_, share in (("ttft_s", "p50"), ("tpot_s", "p90"), ("e2e_s", "p50")):
        value = mine[time_][share]
        assert 0 < value["low"] <= value["value"] <= value["high"] < 20
    assert mine["e2e_s"]["p99"]["high"] is None, "so few requests do not bound it"
    assert 0 < report["comparisons"][0]["e2e_s"]["p50"]["low"] < report["comparisons"][0]["e2e_s"]["p50"]["high"]
    assert report["rollout"]["state"] == "comparing" and report["rollout"]["share"] == 0.5


def test_who_says_its_own_speculation_takes_no_part() -> None:
    with comparing(f"{NGRAM} vs off", share=1.0) as running:
        assert running.complete(prompt="abab", max_tokens=4)["speculation"]["state"] == "on"
        assert running.complete(prompt="abab", max_tokens=4, speculation={"drafter": "none"})["speculation"]["state"] == "off"
        by_header = running.post("/v1/completions", {"prompt": "abab", "max_tokens": 4}, headers={"X-Draftproof-Speculation": "off"})
        assert by_header.json()["speculation"]["state"] == "off"
        assert running.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3,
                                                     "prediction": {"type": "content", "content": "ab"}}).status_code == 400
        report = found(running)
    assert cell(report, CANDIDATE)["requests"] == 1 and cell(report, CONTROL)["requests"] == 0
    assert report["left_out"] == {"they said their own speculation": 2, "they predicted their output": 1}


def test_two_drafters_at_two_depths_in_one_engine() -> None:
    with comparing(f"{NGRAM} depth=5 vs suffix depth=2", share=0.5) as running:
        seen = Counter()
        for i in range(24):
            got = running.complete(prompt="abababab", seed=i, max_tokens=20, user=f"u{i}", ignore_eos=True)
            spec = got["speculation"]
            seen[spec["drafter"], spec["depth"]] += 1
            assert got["choices"][0]["text"] == alone(running.target, "abababab", Sampling(seed=i, max_tokens=20, ignore_eos=True)).text
        assert set(seen) == {("ngram", 5), ("suffix", 2)} and min(seen.values()) > 4


def test_replays_of_a_drafter_that_remembers_are_compared_and_not_timed() -> None:
    with comparing("suffix+ngram vs off", share="shadow", replay=1.0) as running:
        running.complete(prompt="abababab", seed=1, max_tokens=20)
        until(lambda: running.server.experiment.replays.counts["done"] == 1, 60)
        report = found(running)
    replayed = cell(report, CANDIDATE, "replayed")
    assert replayed["requests"] == 1 and replayed["e2e_s"]["p50"] is None and replayed["acceptance"]["drafted"] == 0
    assert report["identity"][0]["identical"] == 1 and report["identity"][0]["paired"]["e2e_s"] is None and not report["replays_timed"]


def test_a_drafter_that_is_always_wrong_has_acceptance_zero_and_identical_texts() -> None:
    with comparing(f"{WRONG} vs off", share="shadow", replay=1.0) as running:
        for i in range(5):
            running.complete(prompt=PROMPTS[i], seed=i, max_tokens=20, temperature=0)
        until(lambda: running.server.experiment.replays.counts["done"] == 5, 60)
        assert running.idle
        report = found(running)
    assert cell(report, CANDIDATE)["requests"] == 0 and cell(report, CONTROL)["requests"] == 5, "nothing of the candidate was served"
    replayed = cell(report, CANDIDATE, "replayed")
    assert replayed["requests"] == 5 and replayed["acceptance"]["drafted"] > 0 == replayed["acceptance"]["accepted"]
    assert replayed["acceptance"]["first_guess"] == 0.0 and cell(report, CONTROL, "replayed")["acceptance"]["drafted"] == 0
    identity = report["identity"][0]
    assert (identity["compared"], identity["identical"], identity["first_difference"]) == (5, 5, None)
    assert identity["paired"]["e2e_s"]["value"] > 0 and report["replays"]["failed"] == 0


@pytest.mark.parametrize("staged", [True, False])
def test_a_lossy_arm_is_found_by_its_replays(staged: bool) -> None:
    """`lossy-typical` keeps neither the text nor its law. Control's replays are the same, so it is the candidate's doing."""
    more: dict[str, Any] = {"stages": (0.2, 0.5), "minimum": 1000} if staged else {"share": "shadow"}
    with comparing(f"{NGRAM} depth=4 rule=lossy-typical vs off", replay=1.0, **more) as running:
        for i in range(16):
            running.complete(prompt="abababab", seed=i, max_tokens=40, user=f"u{i}", ignore_eos=True, metadata={"prompt_class": "loop"})
        done = running.server.experiment.replays.counts
        until(lambda: running.server.experiment.rollout.state == "returned" if staged else done["done"] == 16, 90)
        report = found(running)
    identity = next(one for one in report["identity"] if one["class"] == "loop")
    assert identity["candidate_differed"] + identity["both_differed"] > 0 and identity["first_difference"] is not None
    if staged:
        assert report["rollout"]["reason"].startswith("at 0.2: ") and "differently by the candidate" in report["rollout"]["reason"]
        assert report["rollout"]["returns"] == 1 and report["rollout"]["share"] == 0
    else:
        assert identity["control_differed"] == 0 and identity["compared"] == 16 and report["rollout"]["state"] == "shadow"


def test_a_slow_candidate_is_turned_back_and_everything_is_controls() -> None:
    with comparing(f"{SLOW} vs off", stages=(0.5, 0.9), minimum=2000, alpha=0.05) as running:
        count = ask_until(running, "returned", 600, max_tokens=4)
        report = found(running)
        assert re.search(r"^at 0.5: (tpot|e2e) p50 is at least .* × control's .*; 1.25 × is allowed$", report["rollout"]["reason"])
        assert all(running.complete(prompt="ab", user=f"later{i}", max_tokens=3)["speculation"]["state"] == "off" for i in range(10))
        assert count < 300 and report["rollout"]["share"] == 0
        assert report["rollout"]["history"][-1]["event"].startswith("running → returned")
        with running.client() as client:
            metrics = client.get("/metrics").text
    assert re.search(r'draftproof:ab_returns_total\{experiment="[^"]*",model_name="letters"\} 1\.0', metrics)
    assert re.search(r'draftproof:ab_state\{[^}]*state="returned"\} 1\.0', metrics)


def test_a_candidate_whose_requests_fail_is_turned_back() -> None:
    def wrap(engine: Engine) -> Any:
        true = engine.submit

        def submit(*given: Any, **more: Any) -> Any:
            if (more.get("speculation") or {}).get("drafter") == NGRAM:
                raise Failure("the drafter's device is lost")
            return true(*given, **more)

        engine.submit = submit  # type: ignore[method-assign]
        return engine

    with comparing(f"{NGRAM} vs off", stages=(0.5,), minimum=2000, wrap=wrap) as running:
        assert ask_until(running, "returned", 200) <= 80
        assert re.search(r"(\d+) of \1 requests failed, 0 of control's", running.server.experiment.rollout.reason)
        assert running.post("/v1/completions", {"prompt": "ab", "user": "later", "max_tokens": 3}).status_code == 200
        with running.client() as client:
            assert "everybody keeps control (off)" in client.put("/draftproof/ab", json={"action": "end"}).json()["rollout"]["reason"]
        assert running.complete(prompt="ab", user="later", max_tokens=3)["speculation"]["state"] == "off"


def test_a_candidate_that_goes_out_of_service_is_turned_back() -> None:
    with comparing(f"{BREAKING} vs off", stages=(0.5,)) as running:
        assert ask_until(running, "returned", 40) < 20
        assert "out of service: drafter breaking raised RuntimeError" in running.server.experiment.rollout.reason


def test_a_harmless_candidate_goes_through_its_stages() -> None:
    with comparing(f"{NGRAM} vs off", stages=(0.3, 0.6), minimum=10, ratio=50.0) as running:
        ask_until(running, "holding", 200)
        report = found(running)
        assert [one["event"].split(":")[0] for one in report["rollout"]["history"]] == [
            "running → running, share 0.6", "running → holding, share 0.6"]
        with running.client() as client:
            assert client.put("/draftproof/ab", json={"action": "end"}).json()["rollout"]["state"] == "ended"
            assert running.complete(prompt="ab", user="u1", max_tokens=3)["speculation"]["drafter"] == "ngram", "as the server speculates"
            before = cell(found(running), CANDIDATE)["requests"]
            begun = client.put("/draftproof/ab", json={"action": "restart"}).json()
            assert before and begun["cells"] == [] and begun["rollout"] | {"history": 0} == begun["rollout"] | {
                "state": "running", "at": 0, "share": 0.3, "history": 0}
            assert client.put("/draftproof/ab", json={"action": "win"}).status_code == 400


def test_replays_make_way_and_are_seen_by_nobody() -> None:
    """A replay runs when somebody comes: it ends at once, the answer is the same as ever, and the replay is begun again."""
    slowly, together = threading.Event(), Counter[tuple[int, ...]]()

    def before() -> None:
        together[(sum(ticket.spare for ticket in worker._running), *worker.load)] += 1
        if slowly.is_set():
            time.sleep(0.01)

    with comparing(f"{NGRAM} vs off", share="shadow", max_batch=1, wrap=lambda engine: Around(engine, before)) as running:
        experiment, worker = running.server.experiment, running.server.worker
        assert experiment.config is not None
        object.__setattr__(experiment.config, "replay", 1.0)
        running.complete(prompt="abba", seed=1, max_tokens=30, ignore_eos=True, metadata={"prompt_class": "c"})
        slowly.set()
        until(lambda: any(ticket.spare for ticket in worker._running))
        assert worker.load == (0, 0), "a replay is no load"
        object.__setattr__(experiment.config, "replay", 0.0)
        got = running.complete(prompt="bad", seed=2, max_tokens=4, ignore_eos=True)
        assert got["choices"][0]["text"] == alone(running.target, "bad", Sampling(seed=2, max_tokens=4, ignore_eos=True)).text
        assert set(together) <= {(0, 1, 0), (1, 0, 0), (1, 0, 1)} and together[1, 0, 1] <= 1, "at most the step that ran when it came"
        slowly.clear()
        until(lambda: experiment.replays.counts["done"] == 1, 60)
        assert experiment.replays.counts["interrupted"] == 1
        with running.client() as client:
            metrics = client.get("/metrics").text
        assert 'request_success_total{finished_reason="length",model_name="letters",prompt_class="c"} 1.0' in metrics
        written = re.findall(r"^draftproof:generation_tokens_total\{[^}]*\} ([\d.]+)", metrics, re.M)
        assert sum(map(float, written)) == 34 and "(replay)" not in metrics
        assert running.target.open_slots == []  # type: ignore[attr-defined]


def test_the_engine_may_die_while_something_is_replayed() -> None:
    steps = [0]

    def before() -> None:
        if any(ticket.spare for ticket in worker._running):
            steps[0] += 1
            if steps[0] == 3:
                raise RuntimeError("the device is lost")

    with comparing(f"{NGRAM} vs off", share="shadow", replay=1.0, wrap=lambda engine: Around(engine, before)) as running:
        worker = running.server.worker
        running.complete(prompt="abba", seed=1, max_tokens=30, ignore_eos=True)
        until(lambda: worker.restarts == 1)
        assert running.server.experiment.replays.counts["failed"] == 1
        running.complete(prompt="bad", seed=1, max_tokens=30, ignore_eos=True)
        until(lambda: running.server.experiment.replays.counts["done"] == 1, 60)


def test_the_page_the_document_and_the_numbers() -> None:
    name = "<script>alert(1)</script> & co"
    with comparing(f"{NGRAM} vs off", share=0.5, experiment=name) as running, running.client() as client:
        for i in range(8):
            running.complete(prompt="abab", seed=i, max_tokens=8, user=f"u{i}", metadata={"prompt_class": "code"})
        page = client.get("/draftproof/ab", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert page.headers["content-type"].startswith("text/html") and "Accept" in page.headers["vary"]
        assert all(page.headers[header] == value for header, value in HEADERS.items())
        assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; co" in page.text and "<script" not in page.text and "style=" not in page.text
        assert "<td>code</td><td>candidate</td>" in page.text and "mixed" in page.text
        style = client.get("/draftproof/ab.css")
        assert style.headers["content-type"].startswith("text/css") and "table" in style.text
        for reply in (client.get("/draftproof/ab"), client.get("/draftproof/ab", headers={"Accept": "application/json"}),
                      client.get("/draftproof/ab.json", headers={"Accept": "text/html"})):
            assert reply.headers["content-type"] == "application/json" and reply.json()["experiment"]["name"] == name
        versions = reply.json()["versions"]
        assert set(versions) == {"target", "template", "engine", "drafter of candidate", "drafter of control"}
        metrics = client.get("/metrics").text
    versions = {name: value.replace("\\", "\\\\") for name, value in versions.items()}
    info = next(line for line in metrics.splitlines() if line.startswith("draftproof:ab_info{"))
    assert f'target="{versions["target"]}"' in info and f'drafter_of_candidate="{NGRAM}"' in info and "engine=\"draftproof" in info
    for metric in ("ab_requests_total", "ab_accepted_tokens_total", "ab_ttft_seconds", "ab_tpot_seconds", "ab_e2e_seconds",
                   "ab_drafter_bytes", "ab_acceptance_baseline", "ab_share"):
        assert re.search(rf'^draftproof:{metric}\{{.*model_name="letters"', metrics, re.M), metric


def test_without_an_experiment_there_are_still_books() -> None:
    with serving(letters(), NGRAM, depth=3) as running, running.client() as client:
        for i in range(3):
            running.complete(prompt="ababab", seed=i, max_tokens=20, ignore_eos=True)
        report = found(running)
        assert report["experiment"] is None and cell(report, "served")["requests"] == 3 and report["drift"]["classes"][0]["requests"] == 3
        assert "No experiment" in client.get("/draftproof/ab", headers={"Accept": "text/html"}).text
        assert client.put("/draftproof/ab", json={"action": "end"}).status_code == 409


def test_only_an_admin_steers_and_a_drafter_under_comparison_stays() -> None:
    keys = (Key.of("ops the-secret-key admin", 1), Key.of("user other-secret", 2))
    with comparing(f"{NGRAM} vs off", share=0.5, keys=keys) as running:
        ops, user = ({"Authorization": f"Bearer {key}"} for key in ("the-secret-key", "other-secret"))
        with running.client() as client:
            assert client.get("/draftproof/ab").status_code == 401 and client.get("/draftproof/ab", headers=user).status_code == 200
            assert client.put("/draftproof/ab", json={"action": "end"}, headers=user).status_code == 403
            refused = client.put("/draftproof/speculation", json={"drafter": "none"}, headers=ops)
            assert refused.status_code == 409 and "end it first" in refused.json()["error"]["message"]
            assert client.put("/draftproof/speculation", json={"enabled": False}, headers=ops).status_code == 200
            body = {"model": "letters", "prompt": "ab", "max_tokens": 3}
            for i in range(6):
                assert client.post("/v1/completions", json={**body, "user": f"u{i}"}, headers=user).status_code == 200
            left = client.get("/draftproof/ab", headers=ops).json()
            assert left["left_out"]["the arm did not guess"] == 6 - cell(left, CONTROL)["requests"] > 0
            assert left["rollout"]["history"][-1]["event"] == "speculation was switched"
            assert client.put("/draftproof/ab", json={"action": "end"}, headers=ops).status_code == 200
            assert client.put("/draftproof/speculation", json={"drafter": "none", "enabled": True}, headers=ops).status_code == 200
            begun = client.put("/draftproof/ab", json={"action": "restart"}, headers=ops)
            assert begun.status_code == 409 and "switch back" in begun.json()["error"]["message"]
            assert client.put("/draftproof/speculation", json={"drafter": NGRAM}, headers=ops).status_code == 200
            assert client.put("/draftproof/ab", json={"action": "restart"}, headers=ops).status_code == 200
            assert client.post("/v1/completions", json={**body, "user": "u1"}, headers=user).status_code == 200


def test_whoever_leaves_is_not_held_against_an_arm() -> None:
    hold = threading.Event()
    with comparing(f"{NGRAM} vs off", share=1.0, wrap=lambda engine: Around(engine, lambda: hold.wait(0.05) and None)) as running:
        with running.client() as client, client.stream("POST", "/v1/completions", json={
                "model": "letters", "prompt": "a", "max_tokens": 3000, "stream": True, "ignore_eos": True}) as reply:
            next(reply.iter_lines())
        until(lambda: running.idle)
        hold.set()
        until(lambda: found(running)["left_out"])             # it is counted when the connection has ended, a little later
        report = found(running)
    assert report["left_out"] == {"their client left, or the server stopped": 1} and report["cells"] == []


def test_a_drifting_drafter_raises_an_alarm() -> None:
    """The drafter is spoilt after a while: what it guessed well it now guesses badly; the texts stay what they are."""
    spoilt = threading.Event()
    with comparing(f"{WRONG} vs off", share=1.0) as running:
        lane = running.server.worker._engine.lanes.lanes[0]  # type: ignore[union-attr]
        drafter: Any = lane.drafter
        truth = drafter.next_token
        drafter.next_token = lambda text: truth(text) if spoilt.is_set() else truth(text) - 1      # one off from what is never right
        for i in range(100):
            if i == 75:
                spoilt.set()
            got = running.complete(prompt=PROMPTS[i % 5], max_tokens=10, temperature=0, ignore_eos=True, metadata={"prompt_class": "c"})
            assert got["speculation"]["state"] == "on"
        report = found(running)
    row = next(one for one in report["drift"]["classes"] if one["class"] == "c")
    assert row["alarms"] == 1 and row["last_alarm"]["direction"] == "fell" and row["last_alarm"]["since"] == 0 < row["last_alarm"]["before"]
    assert row["last_alarm"]["at"] - 75 <= 12 and "acceptance of candidate in class c fell" in report["rollout"]["history"][-1]["event"]


def test_arms_that_run_together_are_marked() -> None:
    with comparing(f"{NGRAM} vs off", share=0.5, experiment="x",
                   wrap=lambda engine: Around(engine, lambda: time.sleep(0.005))) as running:
        users = {place("x", "", "user", f"u{i}") < 0.5: f"u{i}" for i in range(20)}
        bodies = [{"prompt": "a", "user": users[side], "max_tokens": 40, "ignore_eos": True} for side in (True, False)]
        threads = [threading.Thread(target=running.complete, kwargs=body) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        running.complete(**bodies[0])
        report = found(running)
    assert (cell(report, CANDIDATE)["mixed"], cell(report, CANDIDATE)["requests"], cell(report, CONTROL)["mixed"]) == (1, 2, 1)


def test_a_full_queue_is_no_client_that_left() -> None:
    """What found no place is of no arm, and shared the engine with nobody. What is written meanwhile is one arm's alone."""
    hold = threading.Event()
    ab = AbConfig(f"{NGRAM} vs off", share=0.5, replay=0.0)
    with serving(letters(), NGRAM, config=ServeConfig(port=0, ab=ab, max_queue=1), max_batch=1,
                 wrap=lambda engine: Around(engine, lambda: hold.wait(20) and None)) as running, ThreadPoolExecutor(2) as pool:
        mine = [f"u{i}" for i in range(99) if place(ab.arms, "", "user", f"u{i}") < 0.5]
        others = [f"u{i}" for i in range(99) if f"u{i}" not in mine]
        body = {"prompt": "ab", "max_tokens": 3, "seed": 1}
        asked = []
        for user, load in zip(mine, ((1, 0), (1, 1)), strict=False):
            asked.append(pool.submit(running.complete, user=user, **body))
            until(lambda load=load: running.server.worker.load == load)
        for user in others[:3]:
            assert running.post("/v1/completions", {**body, "user": user}).status_code == 503
        hold.set()
        assert all(one.result(20) for one in asked)
        report = found(running)
    assert report["left_out"] == {} and cell(report, CONTROL)["requests"] == 0
    assert (cell(report, CANDIDATE)["requests"], cell(report, CANDIDATE)["mixed"]) == (2, 0)

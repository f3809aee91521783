"""Servers that are started here: watched, started again, given up, and ended with all they started."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest

from draftproof.errors import Failure
from draftproof.remote import fleet as module
from draftproof.remote.fleet import Fleet, Launch, Process, Replica

FAKE = (sys.executable, "-S", str(Path(__file__).with_name("fake_vllm.py")), "serve", "model")


def until(true: object, seconds: float = 30.0) -> None:
    end = monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert monotonic() < end, "it did not happen in time"
        sleep(0.02)


def replica(tmp_path: Path, *more: str) -> Replica:
    return Replica("vllm0", False, process=Process(Launch((*FAKE, *more)), tmp_path / "vllm0.log"))


def test_a_dead_server_starts_again(tmp_path: Path) -> None:
    one = replica(tmp_path)
    fleet, told = Fleet([one], 0.05), list[str]()
    fleet.start()
    try:
        fleet.wait(told.append, 60)
        assert told == [f"replica vllm0: up at {one.url}"] and one.model == "fake" and one.context == 512
        assert one.process is not None and one.process.pid is not None
        first = one.process.pid
        os.killpg(first, signal.SIGKILL)
        until(lambda: one.restarts == 1 and one.state == "up")
        assert one.process.pid != first and fleet.pick(False) is one and fleet.pick(True) is None
        last = one.process._process
    finally:
        fleet.close()
    assert last.poll() is not None, "nothing outlives the fleet"


def test_one_that_never_comes_up_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTS", 1)
    fleet = Fleet([replica(tmp_path, "--crash")], 0.05)
    fleet.start()
    try:
        with pytest.raises(Failure, match="status 3: ValueError: this flag crashes the fake"):
            fleet.wait(timeout_s=60)
        assert not fleet.has(plain=False)
    finally:
        fleet.close()


def test_one_that_never_stays_up_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTS", 2)
    one = replica(tmp_path, "--lasts", "0.3")
    fleet, began = Fleet([one], 0.02), monotonic()
    fleet.start()
    try:
        fleet.wait(timeout_s=60)
        until(lambda: one.state == "failed")
        assert one.restarts == 1 and monotonic() - began > 1.0, "the second start waits a second"
        assert re.search(r"status 1: RuntimeError: this flag ends the fake \(started 2 times, never up for a minute; log: ", one.why)
        assert not fleet.has(plain=False)
    finally:
        fleet.close()


def test_one_that_stayed_up_starts_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTS", 1)
    monkeypatch.setattr(module, "STEADY_S", 0.1)
    one = replica(tmp_path, "--lasts", "1")
    fleet = Fleet([one], 0.02)
    fleet.start()
    try:
        until(lambda: one.restarts == 2 and one.state == "up")
    finally:
        fleet.close()


def test_nobody_there(tmp_path: Path) -> None:
    fleet = Fleet([Replica("url0", False, f"http://127.0.0.1:{module.free_port()}")], 0.05)
    fleet.start()
    try:
        with pytest.raises(Failure, match="no vLLM server came up .*url0: it does not answer"):
            fleet.wait(timeout_s=10)
    finally:
        fleet.close()


def test_a_suspect_is_not_asked_until_it_is_seen_well() -> None:
    one, two = Replica("a", False), Replica("b", False)
    one.state = two.state = "up"
    fleet = Fleet([one, two])
    two.live = 5
    assert fleet.pick(False) is one and fleet.pick(False, one) is two
    one.failed_once("test")
    assert fleet.pick(False) is two and one.state == "up", "others may still be read from it"


def test_causes_that_are_known_are_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "vllm0.log").mkdir()
    keyed = ("sh", "-c", 'VLLM_API_KEY=another exec "$0" "$@"', *FAKE)
    for one, why in ((replica(tmp_path), "cannot be started: .*vllm0.log"), (Replica("vllm1", False, process=Process(
            Launch(keyed), tmp_path / "vllm1.log")), "does not take our key")):
        fleet = Fleet([one], 0.05)
        fleet.start()
        try:
            with pytest.raises(Failure, match=why):
                fleet.wait(timeout_s=60)
            assert one.state == "failed"
        finally:
            fleet.close()


def test_one_that_hangs_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANG_S", 0.0)
    monkeypatch.setattr(module, "STOP_S", 0.1)
    monkeypatch.setattr("draftproof.remote.wire.ANSWER_S", 0.1)
    one = replica(tmp_path)
    fleet = Fleet([one], 0.02)
    fleet.start()
    try:
        fleet.wait(timeout_s=60)
        assert one.process is not None and one.process.pid is not None
        os.kill(one.process.pid, signal.SIGSTOP)
        until(lambda: one.restarts == 1 and one.state == "up")
    finally:
        fleet.close()

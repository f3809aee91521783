"""The soak's own judgement: a leak is found, and what is none is not."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from benchmark_module import benchmark


@pytest.fixture(scope="module")
def soak() -> Any:
    return benchmark("soak")


def series(leak: float, seed: int, requests: int = 20_000) -> list[tuple[int, float]]:
    """What a process holds: a base, texts in flight that come and go, and `leak` bytes for every request."""
    dice = random.Random(seed)
    return [(done, 560 + 6 * abs(math.sin(done / 300)) + dice.expovariate(0.5) + leak * done / 1e6) for done in range(0, requests, 120)]


@pytest.mark.parametrize("seed", range(5))
def test_memory_that_comes_and_goes_is_flat_and_a_leak_is_not(soak: Any, seed: int) -> None:
    assert soak.floor(series(0, seed))["flat"]
    found = soak.floor(series(1000, seed))
    assert not found["flat"] and found["risen_mb"]["low"] > 8 and 700 < found["bytes_per_request"] < 1300


def test_too_little_to_tell_is_not_flat(soak: Any) -> None:
    assert not soak.floor([(5, 560.0)] * 50)["flat"]


def test_a_request_is_the_same_every_time_and_all_kinds_are_there(soak: Any) -> None:
    bodies = [soak.request(number) for number in range(112)]
    assert bodies == [soak.request(number) for number in range(112)]
    assert {path for path, _ in bodies} == {"/v1/completions", "/v1/chat/completions"}
    assert all(any(extra.items() <= {**body, **({"logprobs": 1} if "logprobs" in body else {})}.items() for _, body in bodies)
               for extra in soak.EXTRAS)


def test_a_served_model_is_touched_and_holds_nothing_afterwards(soak: Any) -> None:
    served = soak.Served("model", 2)
    try:
        served.touch()
        left = served.idle()
        assert not left["tickets"] + left["slots"] + left["pages"] and left["restarts"] == 0
    finally:
        served.stop()

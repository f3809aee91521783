"""When memory is short guessing pauses, and goes on when there is room again."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest

from draftproof import Engine
from draftproof.engine.memory import EVERY_S, Pressure, _thaw, freeze
from draftproof.models.fake import TableTarget


def test_guessing_pauses_below_the_least_share_and_goes_on_at_twice_that() -> None:
    shares, now = iter([0.5, 0.02, 0.05, 0.06, None]), [0.0]
    pressed = Pressure(0.03, lambda: next(shares), clock=lambda: now[0])

    def later() -> str:
        now[0] += EVERY_S
        return pressed()

    assert pressed() == ""
    assert later() == "memory is short: 2.0% is free, guessing needs 3.0%"
    assert later() == "memory is short: 5.0% is free, guessing needs 6.0%", "more than it takes to begin, lest it flutters"
    assert later() == "" == later(), "where the system does not tell, there is no reason to pause"


def test_it_looks_now_and_then_and_not_at_all_if_any_share_will_do() -> None:
    looks, now = [0], [0.0]

    def left() -> float:
        looks[0] += 1
        return 0.0

    asked, deaf = Pressure(0.03, left, clock=lambda: now[0]), Pressure(0.0, left, clock=lambda: now[0])
    for _ in range(100):
        assert asked() and not deaf()
        now[0] += EVERY_S / 10
    assert looks[0] == 10


def test_the_collector_leaves_alone_what_an_engine_found_and_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at all of torch, 206 ms, was one round in five hundred of sixteen sequences. To count what is left alone takes 35 ms: no
    engine after the first does."""
    gc.unfreeze()
    freeze.cache_clear()
    Engine(TableTarget(5, order=1, seed=0)).close()
    found = gc.get_freeze_count()
    assert found > 10_000
    later = [[] for _ in range(1000)]
    with monkeypatch.context() as patch:
        for name in ("get_freeze_count", "freeze", "collect"):
            patch.delattr(gc, name)
        Engine(TableTarget(5, order=1, seed=0)).close()
    assert gc.get_freeze_count() <= found and gc.is_tracked(later[0])


@pytest.mark.parametrize("bound", ["nanobind", "pybind11_builtins", None])
def test_at_the_end_the_collector_reaches_what_nanobind_would_call_leaked(bound: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's bindings of 3.9 wrote thirty lines behind every command's answer."""
    ends: list[object] = []
    monkeypatch.setattr("atexit.register", ends.append)
    freeze.cache_clear()
    freeze()
    attribute = SimpleNamespace(attribute=type(bound, (type,), {"__module__": bound})("attribute", (), {})) if bound else None
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", SimpleNamespace(ir=attribute) if bound else None)
    assert ends == [_thaw] and gc.get_freeze_count() > 10_000
    _thaw()
    assert (gc.get_freeze_count() == 0) == (bound == "nanobind")

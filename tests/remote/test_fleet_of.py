"""Which servers `serve --engine vllm` makes of its options, and what it does not let through."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from draftproof.commands.remote import _fleet
from draftproof.config import SpeculationConfig
from draftproof.errors import OptionError
from draftproof.models.load import builtin
from draftproof.remote.fleet import Replica
from draftproof.remote.plan import Plan

LOCAL = str(builtin("target"))


def replicas(drafter: str = "ngram", depth: int | None = None, target: str = LOCAL, **given: Any) -> list[Replica]:
    none: dict[str, Any] = dict(urls=(), plain_urls=(), replicas=None, plain_replicas=None, log_dir=None, vllm_python=Path(sys.executable),
                                extra=())
    plan = Plan.of(target, SpeculationConfig(drafter=drafter, depth=depth), extra=given.get("extra", ()))
    if given.get("urls"):
        none["vllm_python"] = None
    with ExitStack() as stack:
        return _fleet(plan, none | given, stack).replicas


def test_depth_0_is_off() -> None:
    assert [replica.plain for replica in replicas(depth=3)] == [False, True]
    assert [replica.plain for replica in replicas(depth=0)] == [True]
    assert [replica.plain for replica in replicas(depth=0, replicas=3)] == [True] * 3
    with pytest.raises(OptionError, match="--url names servers that speculate.*--depth of 1 or more"):
        replicas(depth=0, urls=("http://h:1",))


@pytest.mark.parametrize(("target", "drafter", "offline"), [
    (LOCAL, "ngram", ["1", "1"]), (LOCAL, f"model:{builtin('draft')}", ["1", "1"]), (LOCAL, "eagle3:org/head", [None, "1"]),
    ("org/target", f"model:{builtin('draft')}", [None, None])])
def test_offline_only_where_nothing_is_to_be_fetched(target: str, drafter: str, offline: list[str | None],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    def said() -> list[str | None]:
        launches = [replica.process.launch for replica in replicas(drafter, 3, target) if replica.process is not None]
        return [launch.environment.get("HF_HUB_OFFLINE") for launch in launches]

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert said() == offline
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert said() == [None, None], "the user's word"


@pytest.mark.parametrize("word", ["--api-key", "--api_key=x", "--host", "--port=9", "--ssl-keyfile", "--ssl_certfile=f", "--uds"])
def test_what_would_lock_us_out_is_refused(word: str) -> None:
    with pytest.raises(OptionError, match="behind --: the servers started here"):
        replicas(depth=3, extra=(word, "x"))


def test_what_nobody_would_read_is_refused() -> None:
    for more in ({"extra": ("--seed", "1")}, {"log_dir": Path("logs")}, {"vllm_python": Path(sys.executable)}):
        with pytest.raises(OptionError, match="no server is started here that would read it"):
            replicas(depth=3, urls=("http://h:1",), **more)


@pytest.mark.parametrize("url", [
    "http:///", "http://", "h:8000", "http://h:x", "http://h:99999", "ftp://h:1", "http://:80", "http://[::1", "http://h h:1"])
def test_urls(url: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"--url {url}: expected http://HOST:PORT")):
        replicas(depth=3, urls=(url,))
    with pytest.raises(OptionError, match=re.escape(f"--plain-url {url}: expected http://HOST:PORT")):
        replicas(depth=3, plain_urls=(url,))
    assert [replica.url for replica in replicas(depth=3, urls=("https://[::1]:8000/base/",))] == ["https://[::1]:8000/base"]

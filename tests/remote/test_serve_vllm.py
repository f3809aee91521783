"""Our server in front of fake vLLM servers: the API and the switch, and the command from start to signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner
from remote.fake_vllm import FakeVllm, text_of
from serve.serving import listening

from draftproof import read_trace
from draftproof.cli import commands
from draftproof.commands.remote import front
from draftproof.config import ServeConfig
from draftproof.errors import OptionError
from draftproof.models.load import builtin
from draftproof.models.outline import outline
from draftproof.remote.fleet import Fleet, Replica
from draftproof.remote.vllm import Setting, VllmEngine
from draftproof.serve.run import describe
from draftproof.trace.events import RoundDone

PROMPT = [5, 11]
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture
def site() -> Iterator[tuple[str, FakeVllm, FakeVllm]]:
    """(address, dying speculative server, plain server); the first dies after 30 tokens of one text."""
    spec, plain = FakeVllm(3, die_after=30), FakeVllm(0)
    edge = outline(builtin("target"))
    fleet = Fleet([Replica("spec", False, spec.url), Replica("plain", True, plain.url)], 0.05)
    fleet.start()
    fleet.wait(timeout_s=10)
    server = front(lambda: VllmEngine(fleet, edge, Setting("ngram", 3, "ratio")), describe("demo", edge, "ngram"), edge,
                   ServeConfig(port=0), 64)
    try:
        with listening(server) as (url, _, _):
            yield url, spec, plain
    finally:
        fleet.close()
        for fake in (spec, plain):
            fake.close()


def test_the_api_in_front(site: tuple[str, FakeVllm, FakeVllm]) -> None:
    url, spec, plain = site
    ids, tokenizer = text_of(PROMPT, 60), outline(builtin("target")).tokenizer
    assert tokenizer is not None
    with httpx2.Client(base_url=url, timeout=30) as client:
        def complete(**more: object) -> dict[str, object]:
            answer = client.post("/v1/completions", json={"model": "demo", **BODY, **more})
            assert answer.status_code == 200, answer.text
            found: dict[str, object] = answer.json()
            return found

        assert client.get("/ready").status_code == 200
        found = complete(metadata={"prompt_class": "code"})
        assert found["choices"][0]["text"] == tokenizer.decode([*ids[:20]])  # type: ignore[index]
        assert found["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3  # type: ignore[index]
        assert complete(speculation={"drafter": "none"})["speculation"]["replica"] == "plain"  # type: ignore[index]
        state = client.put("/draftproof/speculation", json={"enabled": False}).json()
        assert state["state"] == "off" and [replica["name"] for replica in state["replicas"]] == ["spec", "plain"]
        assert complete()["speculation"]["replica"] == "plain" and len(spec.bodies) == 1  # type: ignore[index]
        assert client.put("/draftproof/speculation", json={"depth_cap": 2}).status_code == 400
        client.put("/draftproof/speculation", json={"enabled": True})
        long = complete(max_tokens=60)
        assert long["choices"][0]["text"] == tokenizer.decode(ids) and long["restarted"] == 1  # type: ignore[index]
        assert "identical" not in json.dumps(long) and len(plain.bodies) == 3
        metrics = client.get("/metrics").text
        assert "kv_cache_usage_perc" not in metrics, "its server tells of its own cache"
        assert 'spec_decode_num_accepted_tokens_total{model_name="demo",prompt_class="code"}' in metrics


def test_openais_client_streams(site: tuple[str, FakeVllm, FakeVllm]) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=site[0] + "/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "hello"}], max_tokens=12, stream=True, extra_body={"ignore_eos": True},
            stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 12 and "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--url", "http://127.0.0.1:1"], "--url without --engine vllm"),
    (["--engine", "vllm", "--url", "http://127.0.0.1:1"], "say which drafter they run"),
    (["--engine", "vllm", "--drafter", "ngram", "--url", "127.0.0.1:1"], "expected http://HOST:PORT"),
    (["--engine", "vllm", "--drafter", "ngram", "--tree", "12"], "vLLM drafts chains only"),
    (["--engine", "vllm", "--ab", "0.5"], "expected CANDIDATE vs CONTROL"),
    (["--engine", "vllm", "--drafter", "ngram", "--ab", "suffix vs off", "--url", "http://127.0.0.1:1"], "the vLLM servers run 'ngram'"),
    (["--engine", "vllm", "--ab", "ngram vs off", "--url", "http://127.0.0.1:1"], "off is a plain replica, and there is none"),
    (["--engine", "vllm", "--drafter", "ngram", "--vllm-python", "nowhere/python"], "expected the Python interpreter"),
    (["--engine", "vllm", "--drafter", "ngram", "--replicas", "0", "--plain-replicas", "0"], "no vLLM server to run"),
])
def test_wrong_usage(arguments: list[str], said: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(OptionError, match=said):
            CliRunner().invoke(commands, ["serve", *arguments], catch_exceptions=False)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_command_from_start_to_signal(tmp_path: Path) -> None:
    """`--vllm-python` is given a program that runs the fake in vLLM's place."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" -S "{Path(__file__).with_name("fake_vllm.py")}" "$@"\n')
    python.chmod(0o755)
    with (tmp_path / "said").open("w") as said, subprocess.Popen(
            [sys.executable, "-m", "draftproof", "serve", "--engine", "vllm", "--drafter", "ngram", "--depth", "3", "--port", "0",
             "--vllm-python", str(python), "--log-dir", str(tmp_path / "logs"), "--trace", str(tmp_path / "trace.jsonl"),
             "--", "--tag", str(tmp_path)], stdout=subprocess.PIPE, stderr=said, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "serves" in line, (tmp_path / "said").read_text()
            answer = httpx2.post(line.split()[-1] + "/v1/completions", json={"model": "draftproof-demo", **BODY}, timeout=30)
            assert answer.status_code == 200 and answer.json()["speculation"]["replica"] == "vllm0", answer.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert sum(isinstance(event, RoundDone) for event in read_trace(tmp_path / "trace.jsonl")) > 5
    assert "fake is up" in (tmp_path / "logs" / "vllm0.log").read_text()
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"--tag {tmp_path}" not in left, "servers outlived the one that started them"

"""Our server in front of real vLLM servers: one that speculates and a plain one, started and ended by the command.

Needs DRAFTPROOF_VLLM_PYTHON (`make test-vllm`). One start of about two minutes on two cores, in which everything is asked.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from draftproof import read_trace
from draftproof.trace.events import RequestStarted, RoundDone
from draftproof.trace.report import requests

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
PROMPT = "def fibonacci(n):\n"
FLAGS = ("--dtype", "bfloat16", "--max-model-len", "1024", "--max-num-seqs", "8", "--enforce-eager")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, subprocess.Popen[str]]]:
    if not os.environ.get("DRAFTPROOF_VLLM_PYTHON"):
        pytest.skip("DRAFTPROOF_VLLM_PYTHON is not set; run make test-vllm")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "draftproof", "serve", "--engine", "vllm", "--drafter", "model", "--depth", "3", "--port", "0",
               "--log-dir", str(folder), "--trace", str(folder / "trace.jsonl"), "--", *FLAGS]
    with (folder / "said").open("w") as said, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            logs = "\n".join(log.read_text()[-3000:] for log in folder.glob("*.log"))
            assert "serves" in line, (folder / "said").read_text() + logs
            yield line.split()[-1], folder, process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()


def complete(url: str, **more: Any) -> dict[str, Any]:
    body = {"model": "draftproof-demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 64, "ignore_eos": True, **more}
    answer = httpx2.post(url + "/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_everything_in_front_of_vllm(site: tuple[str, Path, subprocess.Popen[str]]) -> None:
    url, folder, _ = site
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as client:
        stream = client.chat.completions.create(
            model="draftproof-demo", messages=[{"role": "user", "content": "Write a loop."}], stream=True, max_tokens=512, temperature=0,
            extra_body={"ignore_eos": True})                         # many: a fast engine's tokens come several in a piece
        assert len([chunk for chunk in stream if chunk.choices and chunk.choices[0].delta.content]) > 4

    guessed = complete(url, metadata={"prompt_class": "code"})
    assert guessed["speculation"]["replica"] == "vllm0" and guessed["usage"]["completion_tokens"] == 64
    told = guessed["metrics"]["speculative_decoding"]
    assert told["num_accepted_draft_tokens"] > 10 and told["num_spec_steps"] + told["num_accepted_draft_tokens"] >= 60
    sampled = complete(url, temperature=0.8, seed=4, logprobs=2)
    assert len(sampled["choices"][0]["logprobs"]["tokens"]) == 64

    assert httpx2.put(url + "/draftproof/speculation", json={"enabled": False}, timeout=30).json()["state"] == "off"
    plain = complete(url)
    assert plain["speculation"]["replica"] == "plain0" and plain["speculation"]["state"] == "off"
    httpx2.put(url + "/draftproof/speculation", json={"enabled": True}, timeout=30)
    assert complete(url, min_p=0.2)["speculation"]["replica"] == "plain0", "vLLM refuses min_p while it speculates"

    state = httpx2.get(url + "/draftproof/speculation", timeout=30).json()
    assert state["state"] == "on" and {replica["state"] for replica in state["replicas"]} == {"up"}
    counters = httpx2.get(state["replicas"][0]["url"] + "/metrics", timeout=30).text
    if "draftproof" in plugins():
        assert re.search(r'draftproof:vllm_draft_tokens_per_pos_total\{engine="0",position="2"\} [1-9]', counters)

    lines: list[str] = []
    body = {"model": "draftproof-demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx2.stream("POST", url + "/v1/completions", json=body, timeout=300) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if len(lines) == 30:
                os.killpg(state["replicas"][0]["pid"], signal.SIGKILL)
    assert lines[-2:] == ["data: [DONE]", ""] or lines[-1] == "data: [DONE]", lines[-3:]
    trace = list(read_trace(folder / "trace.jsonl"))
    last = [event for event in trace if isinstance(event, RequestStarted)][-1].request
    rounds = [event for event in trace if isinstance(event, RoundDone) and event.request == last]
    assert any("continued at replica plain0" in event.reason for event in rounds)
    assert 1 + sum(len(event.tokens) for event in rounds) == 400
    reports = requests(trace)
    assert any(report.prompt_class == "code" and report.tally.accepted > 10 for report in reports.values())


def plugins() -> str:
    """What vLLM's environment has of stat loggers; `make test-vllm` installs ours there."""
    program = "import importlib.metadata as m; print(*m.entry_points(group='vllm.stat_logger_plugins'))"
    return subprocess.run([os.environ["DRAFTPROOF_VLLM_PYTHON"], "-c", program], capture_output=True, text=True, check=True).stdout

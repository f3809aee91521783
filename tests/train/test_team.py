"""Several processes, one drafter: gradients averaged over all of them, each text read by one, the same weights everywhere."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftproof.errors import OptionError
from draftproof.train.team import ALONE, Team, join

pytestmark = pytest.mark.timeout(400)
TESTS = Path(__file__).parent.parent
needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="several processes need accelerate")

MEMBER = """
import json, sys
from pathlib import Path
import torch
from draftproof.audition.logs import Exchange
from draftproof.engine.engine import Engine
from draftproof.models.fake import TableTarget
from draftproof.train.corpus import regenerated
from draftproof.train.features import Tapper
from draftproof.train.loop import Plan, train
from draftproof.train.team import join
from train.test_loop import NextToken, V

folder, team = Path(sys.argv[1]), join(4)
torch.set_num_threads(1)
target = TableTarget(V, order=1, sharpness=4.0)
with Engine(target) as engine:
    texts = regenerated([Exchange(i, (i % V, 3), max_tokens=20) for i in range(10)], engine, 24, 7, folder / "answers.jsonl", None, team)
task, shown = NextToken(V + 1), []
train(task, texts, Tapper(target, task.taps), Plan(40, batch=4, lr=0.03, warmup=5), folder, shown.append, served=lambda: 1.5, team=team)
torch.save({"weights": task.module.state_dict(), "texts": [text.ids for text in texts], "shown": len(shown)}, folder / f"{team.rank}.pt")
team.leave()
"""


def start(count: int, *command: str) -> list[subprocess.Popen[str]]:
    """The command in `count` processes that find each other over loopback, as `accelerate launch --cpu` starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    return [subprocess.Popen([sys.executable, *command], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(count)]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    try:
        told = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *text) for process, text in zip(processes, told, strict=True)]


def trained(count: int, folder: Path) -> list[dict[str, Any]]:
    folder.mkdir()
    for code, _, said in finish(start(count, "-c", MEMBER, str(folder))):
        assert code == 0, said
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@needs_accelerate
def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    (one,), two = trained(1, tmp_path / "one"), trained(2, tmp_path / "two")
    assert all(member["texts"] == one["texts"] for member in two), "both have the texts of all"
    assert sorted(len(file.read_text().splitlines()) for file in (tmp_path / "two").glob("answers.jsonl.*")) == [5, 5]
    assert [member["shown"] for member in two] == [one["shown"], 0] and one["shown"], "the first one shows"
    for name, value in one["weights"].items():
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name])
        assert torch.allclose(two[0]["weights"][name], value, atol=1e-4), "the same gradients but for the order of sums"


@needs_accelerate
def test_the_command_in_two_processes(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=2,
                                 num_key_value_heads=1, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
                                 tie_word_embeddings=False)).save_pretrained(tmp_path / "target")
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt_token_ids": [i % 7, 3, 5], "token_ids": [1], "max_tokens": 24}) + "\n" for i in range(12)))
    (code, out, said), (other, silent, quiet) = finish(start(
        2, "-m", "draftproof", "train", "medusa", "--target", str(tmp_path / "target"), "--data", str(log), "--out", str(tmp_path / "head"),
        "--steps", "6", "--batch", "2", "--length", "32", "--held-out", "2", "--threads", "1", "--json"))
    assert code in (0, 3) and other == 0, said + quiet
    assert json.loads(out.strip().splitlines()[-1])["rounds"] > 0 and "processes: 2" in said
    assert not silent and "step" not in quiet
    assert (tmp_path / "head" / "config.json").exists() == (code == 0)


def test_shares_are_all_and_alone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    items = list(range(12))
    assert sorted(i for rank in range(4) for i in Team(rank, 4).share(items)) == items
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    assert ALONE.average([weight], 0.5) == [0.5] and weight.grad.tolist() == [1.0, 2.0, 3.0]
    assert join(3) == ALONE
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="--batch 3 with 2 processes; expected a multiple of 2"):
        join(3)

"""Several processes, one drafter: gradients averaged over all of them, each text read by one, the same weights everywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train.processes import finish, start
from train.test_loop import NextToken, V

from draftproof.audition.logs import Exchange
from draftproof.engine.engine import Engine
from draftproof.errors import OptionError
from draftproof.models.fake import TableTarget
from draftproof.train import answers
from draftproof.train.corpus import regenerated
from draftproof.train.features import Tapper
from draftproof.train.loop import Plan, train
from draftproof.train.team import ALONE, Team, join

pytestmark = pytest.mark.timeout(400)
needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="several processes need accelerate")

MEMBER = "import sys; from pathlib import Path; from train.test_team import learn; learn(Path(sys.argv[1]))"


def learn(folder: Path) -> None:
    """What each process of a team does, or one alone."""
    team, target = join(4), TableTarget(V, order=1, sharpness=4.0)
    prompts = [Exchange(i, (i % V, 3), max_tokens=20) for i in range(10)]
    with Engine(target) as engine:
        texts = regenerated(prompts, engine, 24, 7, folder / "answers.jsonl", None, team)
    task, shown = NextToken(V + 1), list[Any]()
    train(task, texts, Tapper(target, task.taps), Plan(40, batch=4, lr=0.03, warmup=5), folder, shown.append, served=lambda: 1.5, team=team)
    learnt = {"weights": task.module.state_dict(), "texts": [text.ids for text in texts], "shown": len(shown)}
    torch.save(learnt, folder / f"{team.rank}.pt")
    team.leave()


def read(folder: Path, count: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


@needs_accelerate
def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    learn(tmp_path / "one")
    for code, _, said in finish(start(2, "-c", MEMBER, str(tmp_path / "two"))):
        assert code == 0, said
    (one,), two = read(tmp_path / "one", 1), read(tmp_path / "two", 2)
    assert all(member["texts"] == one["texts"] for member in two), "both have the texts of all"
    assert sorted(len(answers.read(file)) for file in (tmp_path / "two").glob("answers.jsonl.*")) == [5, 5]
    assert [member["shown"] for member in two] == [one["shown"], 0] and one["shown"], "the first one shows"
    for name, value in one["weights"].items():
        assert torch.equal(two[0]["weights"][name], two[1]["weights"][name])
        assert torch.allclose(two[0]["weights"][name], value, atol=1e-4), "the same gradients but for the order of sums"


def test_shares_are_all_and_alone_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    items = list(range(12))
    assert sorted(i for rank in range(4) for i in Team(rank, 4).share(items)) == items
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([1.0, 2.0, 3.0])
    assert ALONE.average([weight], torch.tensor(0.5)).item() == 0.5 and weight.grad.tolist() == [1.0, 2.0, 3.0]
    assert join(3) == ALONE
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="--batch 3 with 2 processes; expected a multiple of 2"):
        join(3)

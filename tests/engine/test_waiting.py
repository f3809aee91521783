"""A round waits for its device once, for the verdict. The device is pretended (tests/models/elsewhere.py); what would wait for a real one
is counted there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from elsewhere import NAME, WAITS, each, elsewhere, leaves, waits_of_rounds

from draftproof import Engine, LoadConfig, Sampling
from draftproof.core import probs
from draftproof.core.choice import Law, likeliest
from draftproof.core.upload import rows_of, sent, uploaded
from draftproof.drafters.base import Needs, Noise, Picks
from draftproof.drafters.grow import Margins
from draftproof.drafters.model import ModelDrafter, _Line
from draftproof.drafters.spines import collected
from draftproof.engine import ahead
from draftproof.engine.marks import Marks
from draftproof.engine.plans import FixedDepth
from draftproof.engine.speculation import Speculation
from draftproof.models.cache import PagedSlot
from draftproof.models.load import builtin, load_target
from draftproof.types import Budget, Commit, Draft, SequenceView, Signals

LOAD = {"dtype": "float32", "self_test": False}
PROMPT = "def fib(n):\n    return fib(n - 1) + fib("


class Wrong:
    """Guesses on the device, always wrongly and outside of the vocabulary."""

    name, needs = "wrong", Needs()

    def __init__(self, device: str) -> None:
        self.device = device

    def open(self, seq: SequenceView, signals: Signals | None) -> None:
        return None

    def propose(self, states: Sequence[None], budgets: Sequence[Budget], noise: Noise) -> list[Draft]:
        return [Draft.chain(uploaded([10**9] * budget.depth, self.device, torch.int64), drafter="wrong") for budget in budgets]

    def observe(self, states: Sequence[None], commits: Sequence[Commit], signals: Sequence[Signals | None]) -> None:
        return None

    def close(self, state: None) -> None:
        return None


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    return waits_of_rounds(monkeypatch)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_one_wait_a_round_and_the_text_of_the_cpu(temperature: float, rounds: list[list[str]], early: bool,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "overlaps", lambda target: early)
    sampling = Sampling(temperature=temperature, max_tokens=10, seed=3, ignore_eos=True)
    with Engine(str(builtin("target")), "none", 0, load=LoadConfig(device="cpu", **LOAD)) as engine:  # type: ignore[arg-type]
        expected = [one.token_ids for one in engine.generate_batch([PROMPT, "x = [1, 2, "], sampling)]
    load = LoadConfig(device=NAME, **LOAD)  # type: ignore[arg-type]
    with elsewhere():
        target = load_target(builtin("target"), load)
        for spec in ("none", "ngram", "model", "pard", "eagle3", "mtp", "medusa", "mlp", Wrong(NAME)):
            rounds.clear()
            with Engine(target, spec, 0 if spec == "none" else 3, load=load) as engine:
                done = engine.generate_batch([PROMPT, "x = [1, 2, "], sampling)
            assert [one.token_ids for one in done] == expected, spec
            assert spec == "none" or all(one.speculation["state"] == "on" for one in done), done[0].speculation
            assert not isinstance(spec, Wrong) or all(one.metrics["drafted"] > one.metrics["accepted"] == 0 for one in done)
            for waits in rounds:
                assert "engine/round.py" in waits[0] and "choices" in waits[0], waits
                # behind the verdict nothing is under way: the draft model's look at what it guessed costs no more than its copy
                assert len(waits) == 1 or spec == "model" and all("drafters/model.py" in wait for wait in waits[1:]), waits


def test_filters_look_at_few_tokens_and_are_the_cpus(rounds: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws of the likeliest tokens alone; where a nucleus is larger, the round is judged once more, by whole laws."""
    monkeypatch.setattr(probs, "_WIDE", 1024)
    remade: list[int] = []
    monkeypatch.setattr(Law, "remade", lambda law, plain=Law.remade: remade.append(1) or plain(law))
    sampling = Sampling(temperature=0.8, top_p=0.9, max_tokens=6, seed=3, ignore_eos=True)
    texts = {}
    with elsewhere():
        for device in ("cpu", NAME):
            target = load_target(builtin("target"), LoadConfig(device=device, **LOAD))  # type: ignore[arg-type]
            for spec, rule, few in (("none", "match", 1024), ("eagle3", "match", 1024), ("none", "match", 4), ("eagle3", "match", 4),
                                    ("eagle3", "ratio", 1024), ("eagle3", "ratio", 4)):
                monkeypatch.setattr(probs, "_THERE", few)
                rounds.clear()
                remade.clear()
                with Engine(target, spec, 0 if spec == "none" else 3, rule=rule) as engine:  # type: ignore[arg-type]
                    texts[device, spec, rule, few] = [one.token_ids for one in engine.generate_batch([PROMPT, "x = [1, 2, "], sampling)]
                assert bool(remade) == (few == 4 and device == NAME)
                for waits in rounds if device == NAME and rule == "match" else ():
                    asked = sum("choices_there()" in wait for wait in waits)
                    assert len(waits) == asked <= (1 if few == 1024 else 2), "the verdict, and once more where it is judged anew"
    assert len({str(text) for (_, _, rule, _), text in texts.items() if rule == "match"}) == 1


@pytest.mark.parametrize("spec", ["medusa", "mlp", "pard", "recycle"])
def test_trees_and_what_was_likely_are_looked_at_once(spec: str, rounds: list[list[str]]) -> None:
    """Texts of several options, trees and depths: beside the verdict a round waits for its trees' levels, or for what was likely."""
    load = LoadConfig(device=NAME, **LOAD)  # type: ignore[arg-type]
    heats = [Sampling(temperature=t, max_tokens=8 + 3 * i, seed=3, ignore_eos=True) for i, t in enumerate((0.0, 0.8))]
    with elsewhere():
        target = load_target(builtin("target"), load)
        for tree in (None, 8):
            with Engine(target, spec, 3, load=load, tree=tree) as engine:
                done = engine.generate_batch([PROMPT, "x = [1, 2, "], heats)
            assert all(one.speculation["state"] == "on" for one in done), done[0].speculation
    assert sum(one.metrics["drafted"] for one in done)
    for waits in rounds:
        rest = [wait for wait in waits if "choices = " not in wait and "choices_there()" not in wait]
        assert len(rest) == len(waits) - 1
        place = "core/choice.py" if spec == "recycle" else "unpacked(packed(levels)"
        assert len(rest) <= 1 and all(place in wait for wait in rest), waits


def test_the_count_sees_what_waits() -> None:
    with elsewhere():
        x = torch.arange(5.0).to(NAME)
        WAITS.clear()
        for wait in (lambda: x.tolist(), lambda: x.sum().item(), lambda: x.cpu(), lambda: torch.tensor([1, 2], device=NAME),
                     lambda: x[x > 2], lambda: (x > 2).nonzero(), lambda: x[torch.tensor([0, 3])], lambda: x.copy_(torch.ones(5))):
            before = len(WAITS)
            wait()
            assert len(WAITS) == before + 1, WAITS
        WAITS.clear()
        y = uploaded([1, 2, 3], NAME) + sent(torch.ones(3).long(), NAME)
        found = rows_of(x, [0, 2]), rows_of(x, [1, 2]), rows_of(x, []), x[1:3] * 2
        assert not WAITS and y.tolist() == [2, 3, 4] and [len(each) for each in found] == [2, 2, 0, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_likely_crosses_as_it_is(dtype: torch.dtype) -> None:
    logits = torch.randperm(60, generator=torch.Generator().manual_seed(1)).view(3, 20).to(dtype) - 30
    expected = likeliest(logits, 4)
    with elsewhere():
        found = likeliest(logits.to(NAME), 4)
    assert all(map(torch.equal, found, expected)) and [each.dtype for each in found] == [torch.int64, torch.float32]


@pytest.mark.parametrize("rows", [[], [3], [1, 2, 3], [3, 2, 1], [0, 2], [2, 2, 3]])
def test_rows(rows: list[int]) -> None:
    x = torch.randn(5, 3)
    assert torch.equal(rows_of(x, rows), x[torch.tensor(rows, dtype=torch.int64)])


def test_a_slot_reads_its_tokens_when_it_is_asked() -> None:
    with elsewhere():
        slot = PagedSlot("", [1, 2])
        slot.add(torch.tensor([3]))
        WAITS.clear()
        for part in (uploaded([4, 5, 6], NAME), torch.tensor([7]), uploaded([8, 9], NAME)):
            slot.add(part)
        assert slot.length == 9 and not WAITS
        slot.cut(8)
        assert slot.length == 8
        slot.cut(5)
        assert slot.length == 5 and not WAITS
        assert slot.tokens == [1, 2, 3, 4, 5] and WAITS
        slot.cut(1)
        assert slot.tokens == [1] and slot.length == 1


def test_trees_of_all_texts_are_shaped_after_one_look() -> None:
    """Beside a chain, whatever it is of, and of a draft model."""
    with elsewhere():
        tokens, values = torch.arange(24).view(8, 3).to(NAME), torch.arange(24.0, 0.0, -1.0).view(8, 3).to(NAME)
        seq = SimpleNamespace(sampling=Sampling(temperature=0.0))
        lines = [SimpleNamespace(seq=seq, rows=[i, i + 2], extra=[1, 2], reason="") for i in range(2)]
        WAITS.clear()
        drafts = collected(lines, [Picks(tokens[:4], values[:4], None), Picks(tokens[4:], values[4:], None)], 30, "some")
        assert len(WAITS) == 2 and [draft.tokens.tolist() for draft in drafts] == [[0, 1, 6, 7, 8], [3, 4, 9, 10, 11]], WAITS
        drafter = ModelDrafter.__new__(ModelDrafter)
        drafter.name, drafter.margins = "model", Margins()
        states = [SimpleNamespace(seq=SimpleNamespace(tokens=[1], sampling=seq.sampling)) for _ in lines]
        trees = [_Line(state, None, i, 2, 3, "", rows=[i, i + 2], spine=[tokens[i, :1]]) for i, state in enumerate(states)]  # type: ignore[arg-type]
        WAITS.clear()
        found = drafter._finish(trees, [Picks(tokens, values, None, shares=-values)])
        assert len(WAITS) == 3 and all(len(draft) == 5 for draft in found), WAITS


class Far(torch.Tensor):
    """Says that it lies on a device that is not there; operations over two of them fail."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: str) -> Far:
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=device)  # type: ignore[attr-defined]
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device, = {str(x.device) for x in leaves(args, []) if isinstance(x, Far)}
        found = func(*each(args, lambda x: x.held if isinstance(x, Far) else x), **(kwargs or {}))
        return each(found, lambda x: Far(x, device))


def test_guesses_lie_on_as_many_devices_as_there_are_drafters() -> None:
    """A chain's draft model may have a GPU of its own, beside a head on the target's."""
    lane = Speculation(None, FixedDepth(3), 10, torch.device("cuda:0"))
    given = [([3, 99], "cuda:0"), ([-7], "cuda:1"), ([], "cuda:0"), ([5], "cpu"), ([12, 4], "cuda:1"), ([8], "cuda:0")]
    drafts = [Draft.chain(ids if device == "cpu" else Far(torch.tensor(ids, dtype=torch.int64), device)) for ids, device in given]
    found = lane._within(drafts)
    assert [getattr(one.tokens, "held", one.tokens).tolist() for one in found] == [[3, 9], [0], [], [5], [9, 4], [8]]
    assert [str(one.tokens.device) for one in found] == [device for _, device in given]


def test_marks_are_of_the_host_where_there_are_no_events() -> None:
    marks = Marks(torch.device("cpu"))
    time.sleep(0.02)
    marks.mark()
    marks.mark()
    first, second, rest = marks.spans()
    assert first >= 0.02 > second >= 0 and rest >= 0

"""The loop on a table's states: it learns, a killed run ends with the same weights, and half-written files are not believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from draftproof.audition.logs import Exchange
from draftproof.engine.engine import Engine
from draftproof.errors import Failure
from draftproof.models.fake import TableTarget
from draftproof.train import checkpoint
from draftproof.train.base import Features
from draftproof.train.corpus import Text, as_logged, mixed, regenerated, split
from draftproof.train.features import Tapper
from draftproof.train.gate import Served, difference, judge, serve
from draftproof.train.loop import Plan, Shown, batch_of, optimizers_of, rate, train
from draftproof.types import Sampling

V = 9


class NextToken:
    """Guesses the next token from one hidden state."""

    taps = (7,)

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.module: nn.Module = nn.Sequential(nn.Linear(width, 16), nn.Linear(16, V))

    def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
        losses = [functional.cross_entropy(self.module(f.taps[7][:-1])[f.mask[1:]], f.ids[1:][f.mask[1:]]) for f in batch]
        return torch.stack(losses).mean(), {"texts": float(len(batch))}

    def save(self, folder: Path) -> None:
        raise AssertionError("the loop does not save drafters")


class Killed(Exception):
    pass


def texts(count: int = 12) -> list[Text]:
    with Engine(TableTarget(V, order=1, sharpness=4.0)) as engine:
        done = engine.generate_batch([[i % V] for i in range(count)], Sampling(temperature=1.0, top_p=1.0, seed=3, max_tokens=20))
    return [Text((i % V, *d.token_ids), 1) for i, d in enumerate(done)]


def run(folder: Path, steps: int = 40, die_at: int | None = None) -> tuple[list[Shown], dict[str, Tensor]]:
    target = TableTarget(V, order=1, sharpness=4.0)
    task, shown = NextToken(V + 1), []

    class Tired(Tapper):
        step = 0

        def read(self, given: Sequence[Text]) -> list[Features]:
            Tired.step += 1
            if die_at is not None and Tired.step > die_at:
                raise Killed
            return super().read(given)

    plan = Plan(steps, batch=4, lr=0.03, warmup=5, save_every=7, look_every=20)
    train(task, texts(), Tired(target, task.taps), plan, folder, shown.append, served=lambda: 1.5)
    return shown, {k: v.clone() for k, v in task.module.state_dict().items()}


def test_it_learns_and_shows_what_is_served(tmp_path: Path) -> None:
    shown, _ = run(tmp_path)
    assert shown[-1].step == 40 and shown[-1].served == 1.5 and shown[-1].loss < shown[0].loss
    assert [s.step for s in shown if s.served] == [20, 40]


@pytest.mark.parametrize("die_at", [0, 6, 7, 20, 39])
def test_a_killed_run_ends_with_the_same_weights(tmp_path: Path, die_at: int) -> None:
    for name in ("whole", "torn"):
        (tmp_path / name).mkdir()
    _, whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "torn", die_at=die_at)
    _, resumed = run(tmp_path / "torn")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_products_have_the_plan_s_precision_while_a_step_is_learned_and_their_own_elsewhere(tmp_path: Path) -> None:
    found: list[str] = []

    class Watched(NextToken):
        def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
            found.append(torch.get_float32_matmul_precision())
            if len(found) == 4:
                raise Killed
            return super().loss(batch)

    class Reading(Tapper):
        def read(self, given: Sequence[Text]) -> list[Features]:
            found.append(torch.get_float32_matmul_precision())
            return super().read(given)

    tapper, plan = Reading(TableTarget(V, order=1), (7,)), Plan(4, batch=4, matmul="medium")
    with pytest.raises(Killed):
        train(Watched(V + 1), texts(), tapper, plan, tmp_path, lambda _: None)
    assert found == ["highest", "medium"] * 2
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_checkpoint_of_another_run_and_a_damaged_one_are_refused(tmp_path: Path) -> None:
    run(tmp_path, steps=10)
    with pytest.raises(Failure, match="another run.*steps was 10, is 20"):
        run(tmp_path, steps=20)
    file = tmp_path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Failure, match="damaged"):
        run(tmp_path, steps=10)


def test_a_run_that_is_over_gives_way_to_another_and_the_same_one_has_nothing_left_to_do(tmp_path: Path) -> None:
    _, first = run(tmp_path, steps=10)
    checkpoint.finish(tmp_path / "checkpoint.safetensors")
    shown, again = run(tmp_path, steps=10)
    assert not shown and all(torch.equal(first[name], again[name]) for name in first)
    with pytest.raises(Killed):
        run(tmp_path, steps=20, die_at=15)                          # begins anew, and is under way from its first checkpoint on
    assert sorted(f.name for f in tmp_path.iterdir()) == ["checkpoint.safetensors"]
    shown, _ = run(tmp_path, steps=20)
    assert shown[-1].step == 20


def test_other_texts_and_tensors_that_do_not_fit_are_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, steps=10)
    other = [Text(text.ids[::-1], 1) for text in texts()]
    with pytest.raises(Failure, match="another run .*data was"):
        train(NextToken(V + 1), other, Tapper(TableTarget(V, order=1), (7,)), Plan(10, batch=4, lr=0.03), tmp_path, lambda _: None)
    module, file = nn.Linear(2, 2), tmp_path / "c.safetensors"
    checkpoint.save(file, 3, module, optimizers_of(module, 0.1), {"taps": (1, 2)})
    assert checkpoint.load(file, module, optimizers_of(module, 0.1), {"taps": (1, 2)}) == 3
    for wrong in (nn.Linear(2, 1), nn.Linear(2, 2, bias=False), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(Failure, match="does not fit the drafter"):
            checkpoint.load(file, wrong, optimizers_of(wrong, 0.1), {"taps": (1, 2)})
    checkpoint.save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(Failure, match="no checkpoint of a training run"):
        checkpoint.load(file, module, optimizers_of(module, 0.1), {})


def test_a_batch_without_a_guess_that_counts_moves_nothing_and_any_seed_will_do(tmp_path: Path) -> None:
    class Silent(NextToken):
        def loss(self, batch: Sequence[Features]) -> tuple[Tensor, Mapping[str, float]]:
            return torch.zeros(()), {}

    task, shown = Silent(V + 1), []
    before = {name: p.clone() for name, p in task.module.state_dict().items()}
    plan = Plan(2, batch=4, lr=0.03, seed=20261128123456)
    train(task, texts(), Tapper(TableTarget(V, order=1), (7,)), plan, tmp_path, shown.append)
    assert shown[-1].loss == 0 and all(torch.equal(before[name], p) for name, p in task.module.state_dict().items())


def test_a_write_that_is_cut_short_leaves_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "c.safetensors", 3, module, optimizers_of(module, 0.1), {})

    def cut(*_: object, **__: object) -> None:
        (tmp_path / "c.part").write_bytes(b"half")
        raise Killed

    monkeypatch.setattr(checkpoint, "save_file", cut)
    with pytest.raises(Killed):
        checkpoint.save(tmp_path / "c.safetensors", 4, module, optimizers_of(module, 0.1), {})
    assert checkpoint.load(tmp_path / "c.safetensors", module, optimizers_of(module, 0.1), {}) == 3


def test_every_text_once_per_epoch_in_a_seeded_order() -> None:
    plan = Plan(10, batch=4, seed=5)
    epoch = [i for step in range(3) for i in batch_of(step, 12, plan)]
    assert sorted(epoch) == list(range(12)) and epoch != list(range(12))
    assert batch_of(1, 12, plan) == batch_of(1, 12, plan) != batch_of(1, 12, Plan(10, batch=4, seed=6))
    assert rate(0, Plan(100, warmup=10)) == 0.1 and rate(30, Plan(100, warmup=10)) == 1.0 and rate(75, Plan(100, warmup=10)) == 0.5


def test_features_are_the_states_of_the_text() -> None:
    target = TableTarget(V, order=1)
    (features,) = Tapper(target, (3, 7), chunk=4).read([Text((1, 2, 3, 4, 5, 6), 2)])
    assert features.mask.tolist() == [False, False, True, True, True, True]
    assert torch.equal(features.taps[3], torch.stack([target.hidden((t,)) for t in (1, 2, 3, 4, 5, 6)]))
    assert not target.open_slots and not any(t.is_inference() for t in features.taps.values())


def test_features_that_are_kept_are_not_read_again_and_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target, read = TableTarget(V, order=1), []
    texts = [Text((1, 2, 3), 1), Text((4, 5, 6), 1), Text((3, 2, 1) * 20, 1), Text((6, 5), 1)]
    room = sum(features.nbytes for text, features in zip(texts, Tapper(target, (3,)).read(texts), strict=True) if len(text.ids) < 60)
    extend = target.extend
    monkeypatch.setattr(target, "extend", lambda slots, tokens: (read.append(len(tokens[0])), extend(slots, tokens))[1])
    tapper, anew = Tapper(target, (3,), keep_mb=room / 1e6), Tapper(TableTarget(V, order=1), (3,))
    for _ in range(2):
        for ours, theirs in zip(tapper.read(texts), anew.read(texts), strict=True):
            assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.mask, theirs.mask) and torch.equal(ours.taps[3], theirs.taps[3])
    assert read == [3, 3, 60, 2, 60], "the one that has no room is read each time"


def test_regenerated_answers_are_the_targets_and_survive_a_kill(tmp_path: Path) -> None:
    target, file = TableTarget(V, order=1), tmp_path / "corpus.jsonl"
    asked = [Exchange(i, prompt_ids=(i % V, 1), answer_ids=(0,), sampling={"temperature": 0.0}) for i in range(20)]
    with Engine(target) as engine:
        whole = regenerated(asked, engine, 10, 1, tmp_path / "whole.jsonl")
        with pytest.raises(Killed):
            regenerated((e if e.line < 13 else _die() for e in asked), engine, 10, 1, file)
        file.write_bytes(file.read_bytes()[:-7])              # the kill came in the middle of a line
        resumed = regenerated(asked, engine, 10, 1, file)
        assert [t.ids for t in resumed] == [t.ids for t in whole] and len(whole) == 20
        greedy = engine.generate([3, 1], Sampling(temperature=0, max_tokens=8))
    assert whole[3].ids == (3, 1, *greedy.token_ids) and whole[3].answer_from == 2


def _die() -> Exchange:
    raise Killed


def test_texts_as_logged_are_cut_to_length() -> None:
    logged = list(as_logged([Exchange(1, prompt_ids=tuple(range(9)), answer_ids=(1,) * 30), Exchange(2, prompt_ids=(5,) * 25)],
                            TableTarget(V), 10))
    assert logged[0] == Text((4, 5, 6, 7, 8, 1, 1, 1, 1, 1), 5)
    assert [len(t.ids) for t in logged[1:]] == [10, 10] and logged[1].answer_from == 0


def test_held_out_texts_are_not_learnt_from_and_the_mix_has_its_share() -> None:
    own = [Text((i, i), 1) for i in range(10)]
    learn, held = split(own, 0.2, 1)
    assert len(held) == 2 and not {t.ids for t in learn} & {t.ids for t in held}
    assert len(mixed(own, [Text((99,), 0)], 0.2, 0)) == 12 and mixed(own, [], 0.5, 0) == own
    with pytest.raises(Failure, match="at least 2"):
        split(own[:1], 0.5, 0)


def test_only_what_is_served_better_is_published() -> None:
    target, held = TableTarget(V, order=1, sharpness=4.0), texts(4)
    good, bad = serve(target, "ngram", held, 4, 20, 1), Served(1.0, 50, 200, 0)
    assert good.length > 1 and good.drafted and 1 + good.accepted / good.rounds == pytest.approx(good.length, abs=0.2)
    assert judge(good, bad, "x").publish and not judge(bad, good, "x").publish and not judge(good, good, "x").publish
    assert not judge(bad, None, "").publish and judge(good, None, "").publish
    assert sum(rounds for _, rounds in good.each) == good.rounds and len(good.each) == 4


def test_a_difference_has_an_interval_over_the_prompts_that_both_had() -> None:
    def seen(*each: tuple[int, int]) -> Served:
        return Served(sum(e for e, _ in each) / sum(r for _, r in each), sum(r for _, r in each), 9, 9, each)

    old = seen((20, 10), (40, 20), (30, 15), (20, 10))
    same, more = difference(old, old), difference(seen((30, 10), (60, 20), (45, 15), (30, 10)), old)
    assert same == (0, 0) and more == pytest.approx((1, 1)), "each prompt gained as much"
    found = difference(seen((10, 10), (80, 20), (30, 15), (20, 10)), old)
    assert found is not None and found[0] < 0 < found[1] and judge(seen((21, 10)), seen((20, 10)), "x").interval is None
    # by hand: two prompts of ten rounds, differences 0.1 and 0.3, half the interval t · 0.1 with one degree of freedom
    assert difference(seen((21, 10), (23, 10)), seen((20, 10), (20, 10))) == pytest.approx((0.2 - 0.715, 0.2 + 0.715))

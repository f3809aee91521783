"""Recorded chains, with a recorder that hands back what it was given but is as strict as a graph, against the level loop of torch: the same
tokens, and margins and hidden states as near as another shape of attention leaves them. CUDA itself is not here."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from contract.table_rounds import SharedNoise, Text, opened, plain, speculate
from elsewhere import NAME, WAITS, elsewhere
from test_graphs import Watch
from torch import Tensor, nn

from draftproof import Engine, LoadConfig, Sampling
from draftproof.core import noise
from draftproof.core.choice import FEW
from draftproof.drafters import recurrent
from draftproof.drafters.eagle import Eagle2Drafter, EagleDrafter
from draftproof.drafters.eagle3 import Eagle3Drafter
from draftproof.drafters.mtp import MtpDrafter
from draftproof.models.fake import TableTarget
from draftproof.models.graphs import CudaRecorder
from draftproof.models.heads import blocks, cache, recorded
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.heads.recorded import RecordedChains, Recording
from draftproof.models.load import builtin, load_target
from draftproof.types import Budget, Commit, Draft, Signals

V = 60
SOME = torch.arange(0, V, 2)
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 48}


class Recorder:
    """`Record` that records nothing: what a replay reads lies where it lay at the recording, and what it writes overwrites what it wrote
    before."""

    def __init__(self) -> None:
        self.made: list[Recording] = []
        self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        recording: Recording = run.__self__  # type: ignore[attr-defined]
        self.made.append(recording)
        for _ in range(2):
            first = run()
        places = self._places(recording)

        def replay() -> Any:
            assert self._places(recording) == places, "a graph would read freed memory"
            self.replays += 1
            with Watch():
                found = run()
            for kept, new in zip(first, found, strict=True):
                kept.copy_(new)
            return type(first)(*first)

        return replay

    def _places(self, recording: Recording) -> list[int]:
        tensors = recording.store, recording.numbers, recording.features, recording.keys
        return [getattr(tensor, "held", tensor).data_ptr() for tensor in tensors]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and noise run by the lines of torch, unpacked."""
    monkeypatch.setattr(noise, "FEW", -1)
    monkeypatch.setattr(blocks, "compiled", lambda *_: False)
    monkeypatch.setattr(recurrent, "can_pack", lambda dtype: (False, ""))


def eagle3(target: TableTarget, **more: Any) -> Eagle3Drafter:
    return Eagle3Drafter(Eagle3Head.fresh(target.parts, SOME, hidden=32, layers=2, **SIZES), V, **more)


def eagle3_whole(target: TableTarget, **more: Any) -> Eagle3Drafter:
    return Eagle3Drafter(Eagle3Head.fresh(target.parts, None, hidden=32, norms="fc_norm", norm_output=True, **SIZES), V, **more)


def eagle(target: TableTarget, **more: Any) -> EagleDrafter:
    return EagleDrafter(EagleHead.fresh(target.parts, **SIZES), V, **more)


def eagle2(target: TableTarget, **more: Any) -> EagleDrafter:
    return Eagle2Drafter(EagleHead.fresh(target.parts, **SIZES), V, **more)


def mtp(target: TableTarget, **more: Any) -> MtpDrafter:
    return MtpDrafter(MtpHead.fresh(target.parts), V, **more)


HEADS = [eagle3, eagle3_whole, eagle, eagle2, mtp]


def pair(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> tuple[TableTarget, Any, Any, Recorder]:
    """A target; a drafter that records, and its twin with the same head, which does not."""
    target, recorder, made = TableTarget(V, order=1, seed=1), Recorder(), []
    for graphs in (True, False):
        torch.manual_seed(3)
        monkeypatch.setattr(recurrent, "recorder", lambda device: recorder)
        drafter = build(target, graphs=graphs)
        for name, parameter in drafter.head.named_parameters():
            if "norm" not in name and not isinstance(drafter, EagleDrafter):      # whose recursion nothing keeps in bounds
                parameter.data.mul_(2)
        made.append(drafter)
    assert isinstance(made[0].recorded, RecordedChains) and made[1].recorded is None
    return target, *made, recorder


FILTERS: list[dict[str, Any]] = [{"top_p": 0.6}, {"top_k": 3, "top_p": 0.9}, {"min_p": 0.2}, {}]


def text(seed: int, temperature: float, length: int = 12, most: int = 40, **filters: Any) -> Text:
    tokens = torch.randint(1, V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Text.of(tokens, Sampling(**{"temperature": temperature, "top_p": 1.0, "max_tokens": most, **filters}), seed=seed)


def same(one: Draft, other: Draft) -> bool:
    return one.tokens.tolist() == other.tokens.tolist() and one.parents == other.parents and one.reason == other.reason and \
        one.score is not None and other.score is not None and torch.allclose(one.score.cpu(), other.score.cpu(), rtol=1e-3, atol=1e-3)


def remembered(states: Sequence[Any]) -> Iterator[Tensor]:
    for state in states:
        yield state.cache.room(0)[:, :, :state.window.held]
        if state.last is not None:
            yield state.last


def both(target: TableTarget, drafters: Sequence[Any], texts: Callable[[], list[Text]], wish: Callable[[int, int], tuple[int, int]]) -> int:
    """Rounds with each: the same drafts, and after every round the same entries. How many drafts there were."""
    seen = []
    for drafter in drafters:
        own, left = texts(), []
        log = speculate(target, drafter, own, wish, after=lambda states, left=left: left.append([x.clone() for x in remembered(states)]))
        seen.append(([one.tokens for one in own], log.drafts, left))
    (tokens, drafts, entries), (expected, others, twins) = seen
    assert tokens == expected and len(drafts) == len(others)
    for one, other in zip(drafts, others, strict=True):
        assert not len(one) and not len(other) or same(one, other), (one, other)
    for mine, yours in zip(entries, twins, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(mine, yours, strict=True))
    return len(drafts)


def test_a_head_that_slides_is_recorded_while_the_text_fits_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    target, *drafters, recorder = pair(eagle3, monkeypatch)
    for drafter in drafters:
        drafter.head.layers.windows = (24, 24)
    assert both(target, drafters, lambda: [text(1, 0.0), text(2, 0.7, 9)], lambda at, left: (4, 4 + 4 * (at % 2)))
    assert recorder.replays


@pytest.mark.parametrize("build", HEADS)
def test_recorded_chains_are_those_of_the_levels(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Depths from 1 to 8, one greedy text, one sampled, and five of both; nearly every draft is rejected, as the heads know nothing."""
    target, one, twin, recorder = pair(build, monkeypatch)
    for temperatures in ((0.0,), (0.8,), (0.8, 0.0, 0.8, 0.8, 0.0)):
        drafts = both(target, (one, twin), lambda each=temperatures: [text(seed, t, 5 + 3 * seed) for seed, t in enumerate(each)],
                      lambda i, n: (1 + (n + i) % 8,) * 2)
        assert drafts > 20 * len(temperatures)
    assert recorder.replays > len(recorder.made) > 8 and {made.bucket.greedy for made in recorder.made} == {True, False}
    assert one.recorded.pool.slots == 8 and sorted(one.recorded.pool._free) == list(range(8)), "all were closed"


def test_texts_of_several_temperatures_share_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    both(target, (one, twin), lambda: [text(seed, temperature) for seed, temperature in enumerate((0.0, 0.3, 1.0, 2.0, 0.0))],
         lambda i, n: (4, 4))
    assert any(not made.bucket.greedy for made in recorder.made)


@pytest.mark.parametrize("nodes", [4, 12])
def test_temperatures_may_be_whole_numbers(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    both(target, (one, twin), lambda: [text(seed, temperature) for seed, temperature in enumerate((1, 2))], lambda i, n: (4, nodes))
    assert recorder.made and not any(made.bucket.greedy for made in recorder.made)


@pytest.mark.parametrize("nodes", [4, 12])
@pytest.mark.parametrize("build", [eagle3, mtp])
def test_filters_are_recorded_too(build: Callable[..., Any], nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of several filters, one greedy, share a recording; without any another one is made."""
    target, one, twin, recorder = pair(build, monkeypatch)
    for some in (FILTERS, FILTERS[3:]):
        both(target, (one, twin), lambda some=some: [*(text(seed, 0.9, **each) for seed, each in enumerate(some)), text(9, 0.0, top_p=0.5)],
             lambda i, n: (4, nodes))
    assert {made.bucket.filtered for made in recorder.made} == {True, False} and recorder.replays > 2 * len(recorder.made)


@pytest.mark.parametrize("build", [eagle, eagle3])
def test_siblings_and_trees_beside_chains(build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed siblings are recorded, and trees that grow; texts whose options look back go level by level, over the same entries."""
    target, one, twin, recorder = pair(build, monkeypatch)

    def texts() -> list[Text]:
        looks_back = Sampling(temperature=0.7, top_p=1.0, max_tokens=40, repetition_penalty=1.3)
        return [text(1, 0.0), text(2, 0.8), Text.of([3, 4, 5, 6], looks_back, seed=4), text(3, 0.5)]

    both(target, (one, twin), texts, lambda i, n: ((4, 4), (3, 9), (5, 12), (0, 0), (2, 2))[(i + n) % 5])
    assert recorder.replays > 5
    if build is eagle:
        assert max(made.bucket.candidates for made in recorder.made) > FEW


def test_perfect_drafts_feed_many_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target would choose stands for the draft: all of it is accepted, and is fed in the next round."""
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    truth = [plain(target, text(seed, 0.0)) for seed in range(3)]
    for drafter in (one, twin):
        propose = drafter.propose

        def right(states: Any, budgets: Any, noise: Any, propose: Any = propose) -> list[Draft]:
            found = propose(states, budgets, noise)
            return [Draft.chain(torch.tensor(truth[state.seq.seed][len(state.seq.tokens):][:budget.depth])) if len(draft) else draft
                    for state, draft, budget in zip(states, found, budgets, strict=True)]

        monkeypatch.setattr(drafter, "propose", right)
    fed: list[int] = []
    fill = Recording.fill
    monkeypatch.setattr(Recording, "fill", lambda self, some, keys: fed.extend(len(one.tokens) for one in some) or fill(self, some, keys))
    seen = []
    for drafter in (one, twin):
        texts, left = [text(seed, 0.0) for seed in range(3)], []
        speculate(target, drafter, texts, lambda i, n: (6, 6), lambda states, left=left: left.extend(map(Tensor.clone, remembered(states))))
        seen.append(left)
        assert [one.tokens for one in texts] == truth
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*seen, strict=True))
    assert set(fed) >= {7, 11} and recorder.replays, "drafts of 6 and the token behind them, and prompts of 12"


def test_sequences_join_and_leave_and_the_pool_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random company through many rounds, long texts among short ones; slots are used again."""
    monkeypatch.setattr(cache, "POOLED", 16)
    monkeypatch.setattr(recorded, "POOLED", 16)
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    draw, texts, states = random.Random(5), dict[int, Text](), dict[int, list[Any]]()
    target.set_taps(one.needs.taps)
    slots: dict[int, Any] = {}
    stores = set()
    for number in range(60):
        if not texts or len(texts) < 6 and draw.random() < 0.3:
            fresh = texts[number] = text(number, draw.choice([0.0, 0.9]), draw.choice([2, 9, 40, 90]), 500)
            slots[number] = target.open(fresh.tokens)
            rows = dict(target.extend([slots[number]], [torch.tensor(fresh.tokens[:-1])]).taps)
            states[number] = [drafter.open(fresh, Signals(0, rows)) for drafter in (one, twin)]
        chosen = sorted(draw.sample(sorted(texts), draw.randint(1, len(texts))))
        budgets = [Budget(depth, depth, "", "") for depth in (draw.randint(1, 8) for _ in chosen)]
        drafts = [drafter.propose([states[i][which] for i in chosen], budgets, SharedNoise()) for which, drafter in enumerate((one, twin))]
        assert all(same(a, b) and len(a) == budget.depth for a, b, budget in zip(*drafts, budgets, strict=True)), number
        commits, signals = [], []
        for i in chosen:
            new = tuple(draw.randrange(V) for _ in range(draw.randint(1, 5)))
            rows = dict(target.extend([slots[i]], [torch.tensor([texts[i].tokens[-1], *new[:-1]])]).taps)
            commits.append(Commit(len(texts[i].tokens), new, ("accepted",) * len(new), ()))
            signals.append(Signals(len(texts[i].tokens) - 1, rows))
            texts[i].tokens += new
        for which, drafter in enumerate((one, twin)):
            drafter.observe([states[i][which] for i in chosen], commits, signals)
        stores.add(tuple(one.recorded.pool.store.shape))
        if draw.random() < 0.2:
            gone = draw.choice(sorted(texts))
            for which, drafter in enumerate((one, twin)):
                drafter.close(states[gone][which])
            del texts[gone], states[gone]
    assert len(stores) > 3 and one.recorded.pool.room >= 128 and one.recorded.pool.slots <= 8
    assert recorder.replays > 20 and all(made.store is one.recorded.pool.store for made in one.recorded.held.values())


def test_what_the_pool_has_no_room_for_goes_level_by_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "POOLED", 16)
    monkeypatch.setattr(recorded, "POOLED", 16)
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    entry = one.recorded.pool.store[:, :, 0, 0].numel() * 4
    monkeypatch.setattr(cache, "MOST_BYTES", 2 * 32 * entry)
    both(target, (one, twin), lambda: [text(seed, 0.8, length) for seed, length in enumerate((5, 25, 8, 70))], lambda i, n: (3, 3))
    pool = one.recorded.pool
    assert recorder.replays and (pool.slots, pool.room) == (4, 16) and sorted(pool._free) == [0, 1, 2, 3]


def test_a_draft_outlives_the_next_and_may_be_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time nothing waits, and the levels go on from what the recording left."""
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    states = [opened(target, drafter, [text(1, 0.8), text(2, 0.8)])[0] for drafter in (one, twin)]
    kept = []
    for depth in (4, 4, 2):
        drafts, others = (drafter.propose(mine, [Budget(depth, depth, "", "")] * 2, SharedNoise())
                          for drafter, mine in zip((one, twin), states, strict=True))
        assert all(map(same, drafts, others))
        kept += [(draft, draft.tokens.clone()) for draft in drafts]
    assert recorder.replays == 1 and all(torch.equal(draft.tokens, tokens) for draft, tokens in kept)
    opened(target, one, [text(3, 0.8)])
    states = opened(target, one, [text(4, 0.8)])[0]
    one.propose(states, [Budget(4, 4, "", "")], SharedNoise())
    assert all(torch.equal(draft.tokens, tokens) for draft, tokens in kept)


def test_a_rule_that_keeps_laws_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    target, one, _, recorder = pair(eagle3, monkeypatch)
    states = opened(target, one, [text(1, 0.8)])[0]
    draft, = one.propose(states, [Budget(4, 4, "", "")], SharedNoise(keep_law=True))
    assert draft.law is not None and not recorder.made


def test_long_prompts_are_fed_by_the_levels_but_for_their_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "CHUNK", 32)
    target, one, twin, recorder = pair(eagle3, monkeypatch)
    both(target, (one, twin), lambda: [text(1, 0.0, 100), text(2, 0.9, 17), text(3, 0.9, 18)], lambda i, n: (4, 4))
    assert recorder.made[0].bucket.width == 16 and recorder.made[0].bucket.rows == 32, "1 + 16 + 1 rows"


@pytest.mark.parametrize("way", ["a broken recorder", "a broken replay", "no CUDA"])
def test_a_recording_that_fails_costs_nothing_but_a_warning(way: str, monkeypatch: pytest.MonkeyPatch,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    if way == "no CUDA" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    target, one, twin, _ = pair(eagle3, monkeypatch)

    def broken(run: Callable[[], Any]) -> Callable[[], Any]:
        run()
        if way == "a broken recorder":
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        def replay() -> Any:
            raise RuntimeError("an illegal memory access")

        return replay

    one.recorded.record = CudaRecorder(torch.device("cuda")) if way == "no CUDA" else broken
    with caplog.at_level(logging.WARNING, "draftproof.models"):
        both(target, (one, twin), lambda: [text(seed, 0.8) for seed in range(3)], lambda i, n: (4, 4))
    assert len(caplog.records) == 1 and one.recorded.failed and not one.recorded.held
    assert way == "no CUDA" or "stream is capturing" in one.recorded.failed or "illegal" in one.recorded.failed


def test_a_recording_is_made_once_for_what_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    target, one, _, recorder = pair(eagle3, monkeypatch)
    monkeypatch.setattr(recorded, "MOST_HELD", 2)

    def draft(seed: int, depth: int, temperature: float = 0.8) -> int:
        state = opened(target, one, [text(seed, temperature, 3 + seed)])[0][0]
        one.propose([state], [Budget(depth, depth, "", "")], SharedNoise())
        one.close(state)
        return len(recorder.made)

    assert [draft(seed, 4) for seed in range(1, 6)] == [1] * 5 and draft(1, 4, 0.0) == 2, "temperature 0 draws no noise"
    assert draft(1, 3) == 3 and len(one.recorded.held) == 2
    assert draft(1, 3) == 3 and draft(1, 4, 0.0) == 3 and draft(1, 4) == 4, "the one idle longest went"


def test_the_configuration_says_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "recorder", lambda device: Recorder())
    target = TableTarget(V, order=1, seed=1)
    assert isinstance(eagle3(target).recorded, RecordedChains)
    assert MtpDrafter(MtpHead.fresh(target.parts, 2), V).recorded is None, "several layers"
    texts = []
    for graphs in (True, False):
        load = LoadConfig(dtype="float32", graphs=graphs, self_test=False, threads=torch.get_num_threads())
        with Engine(drafter="eagle3", depth=4, load=load) as engine:
            drafter = engine.speculation.drafter
            drafter.compiled = None
            assert (drafter.recorded is not None) is graphs
            done = engine.generate_batch(["class Stack:\n", "def fib(n):"], Sampling(temperature=0.8, seed=3, max_tokens=30))
            assert not graphs or drafter.recorded.held and not drafter.recorded.failed
            texts.append([(one.token_ids, one.metrics["drafted"], one.metrics["accepted"]) for one in done])
    assert texts[0] == texts[1]


def test_a_device_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pretended device, which counts what would wait for a real one; of the texts one is greedy."""
    recorder, waits, texts = Recorder(), list[str](), []
    monkeypatch.setattr(recurrent, "recorder", lambda device: recorder)
    propose, observe = recurrent.RecurrentDrafter.propose, recurrent.RecurrentDrafter.observe

    def watched(act: Callable[..., Any]) -> Callable[..., Any]:
        def acted(*args: Any) -> Any:
            WAITS.clear()
            done = act(*args)
            waits.extend(WAITS)
            return done

        return acted

    monkeypatch.setattr(recurrent.RecurrentDrafter, "propose", watched(propose))
    monkeypatch.setattr(recurrent.RecurrentDrafter, "observe", watched(observe))
    sampling = [Sampling(temperature=temperature, max_tokens=16, seed=3, ignore_eos=True) for temperature in (0.8, 0.0, 0.8)]
    load = LoadConfig(device=NAME, dtype="float32", self_test=False, threads=torch.get_num_threads())
    with elsewhere():
        target = load_target(builtin("target"), load)
        for spec in ("none", "eagle3"):
            with Engine(target, spec, 0 if spec == "none" else 3, load=load) as engine:
                done = engine.generate_batch(["def fib(n):", "x = [1, 2, ", "import"], sampling)
            texts.append([one.token_ids for one in done])
            assert spec == "none" or all(one.metrics["accepted"] for one in done)
    assert texts[0] == texts[1] and not waits and recorder.replays > 3


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_a_norm_on_a_device_is_the_norm(dtype: torch.dtype, near: float) -> None:
    norm = blocks.RMSNorm(32, 1e-5).to(dtype).requires_grad_(False)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    x = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = norm(x)
    with elsewhere(), torch.inference_mode():
        weight = norm.weight.data.to(NAME)
        del norm.weight
        norm.weight = weight
        found = norm(x.to(NAME)).cpu()
    assert torch.allclose(found.float(), expected.float(), rtol=near, atol=near)


def on_cuda() -> tuple[TableTarget, list[Eagle3Drafter]]:
    """A target; a drafter whose launches are graphs, and its twin with the same head, on a device."""
    target, made = TableTarget(V, order=1, seed=1), []
    for graphs in (True, False):
        torch.manual_seed(3)
        head = Eagle3Head.fresh(target.parts, SOME, hidden=32, layers=2, **SIZES).cuda()
        made.append(Eagle3Drafter(head, V, graphs))
        keep = made[-1]._keep
        made[-1]._keep = lambda state, rows, start, keep=keep: keep(state, rows.cuda(), start)  # type: ignore[method-assign, misc]
    return target, made


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_cuda_graphs_draft_what_the_levels_draft(temperature: float) -> None:
    """Not the pretended recorder: graphs, on a device."""
    target, made = on_cuda()
    for batch in (1, 5):
        both(target, made, lambda n=batch: [text(seed, temperature, 5 + 3 * seed) for seed in range(n)],  # type: ignore[misc]
             lambda i, n: (1 + (n + i) % 8,) * 2)
    assert made[0].recorded is not None and made[0].recorded.held and not made[0].recorded.failed

"""Recorded passes, with a recorder that hands back what it was given: buckets, filling up and static tensors against the ordinary pass,
bit by bit. What a recording may not do is watched; CUDA itself is not here."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from elsewhere import NAME, elsewhere, here, leaves
from test_fused import play, save
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import Engine, Sampling
from draftproof.config import LoadConfig
from draftproof.models import graphs, load
from draftproof.models.fused_pass import FusedPass
from draftproof.models.graphs import BEYOND, Bucket, CudaRecorder, GraphedPass, Recording, Run, passes, ragged, rounded
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.passes import Pass, pages_seen
from draftproof.models.passes import Path as Along
from draftproof.types import Draft

LOOKS = {"_local_scalar_dense", "lift_fresh", "nonzero", "equal", "masked_select"}  # each waits for the device, or copies from the host


class Watch(TorchDispatchMode):
    """Within it, nothing may look at a number or come from Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = [index for index in args[1] if index is not None and index.dtype == torch.bool] if name == "index" else []
        assert name not in LOOKS and not masks, f"a recording may not call {func}"
        return func(*args, **(kwargs or {}))


class Recorder:
    """`Record` that records nothing, but is as strict as a graph: what a replay reads lies where it lay at the recording, and what it
    writes overwrites what it wrote before."""

    def __init__(self) -> None:
        self.made: list[Recording] = []
        self.replays = 0

    def __call__(self, run: Run) -> Run:
        recording: Recording = run.__self__  # type: ignore[attr-defined]
        self.made.append(recording)
        logits, taps = run()
        places = self._places(recording)

        def replay() -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
            assert self._places(recording) == places, "a graph would read freed memory"
            self.replays += 1
            with Watch():
                found, tapped = run()
            logits.copy_(found)
            for layer, hidden in taps.items():
                hidden.copy_(tapped[layer])
            return logits, taps

        return replay

    def _places(self, recording: Recording) -> list[int]:
        pool, fused = recording.pool, recording.fused
        assert fused.angles is not None
        stores = [tensor for store in (pool.keys, pool.values) for tensor in store.values()]
        return [getattr(tensor, "held", tensor).data_ptr() for tensor in (*stores, fused.angles, recording.numbers, recording.ids)]


class Tape(Watch):
    """`Record` as a graph is one: what was called once is called again, over the same tensors, and nothing of Python runs. Memory that a
    call only asks for holds what others left there."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __call__(self, run: Run) -> Run:
        run()
        self.calls = calls = []
        with self:
            found = run()

        def replay() -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
            self.replays += 1
            for func, args, kwargs, before in calls:
                if func.overloadpacket.__name__ in ("empty", "empty_like", "new_empty"):
                    before.fill_(torch.nan if before.is_floating_point() else -1)
                    continue
                given = {place(x) for x in leaves(kwargs, leaves(args, [])) if isinstance(x, torch.Tensor)}
                for old, new in zip(leaves([before], []), leaves([func(*args, **kwargs)], []), strict=True):
                    if isinstance(old, torch.Tensor) and place(old) not in given:        # else a view, or what was written in place
                        old.copy_(new)
            return found

        return replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        self.calls.append((func, args, kwargs or {}, found))
        return found


def place(x: torch.Tensor) -> int:
    """Of the memory that a tensor lies in."""
    held: torch.Tensor = here(x)
    return held.untyped_storage().data_ptr()


@contextmanager
def recorded(recorder: Any = None) -> Iterator[Any]:
    """Loads within it record."""
    recorder = recorder or Recorder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_recorder", lambda device: recorder)
        yield recorder


def pair(folder: Path, dtype: str = "float32", device: str = "cpu") -> tuple[PagedTarget, PagedTarget, Recorder]:
    """(recorded, run one by one)."""
    config = LoadConfig(dtype=dtype, device=device, page_tokens=16, self_test=False, threads=torch.get_num_threads())
    with recorded() as recorder:
        target = load_target(folder, config)
    twin = load_target(folder, config)
    assert isinstance(target, PagedTarget) and isinstance(twin, PagedTarget)
    assert type(target.fused) is GraphedPass and type(twin.fused) is FusedPass
    return target, twin, recorder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "ministral", "biased llama", "qwen3_moe", "mixtral"])
def test_recorded_passes_have_the_bits_of_ordinary_ones(family: str, dtype: str, tmp_path: Path, as_on_a_device: None) -> None:
    save(family, tmp_path)
    target, twin, recorder = pair(tmp_path, dtype)
    for one, other in zip(play(target), play(twin), strict=True):
        assert one.starts == other.starts and torch.equal(one.logits, other.logits)
        assert set(one.taps) == set(other.taps) == {0, 2} and all(torch.equal(one.taps[i], other.taps[i]) for i in (0, 2))
    assert recorder.replays == 8 and target.facts.reasons["passes"].startswith("recorded: ")


@pytest.mark.parametrize("family", ["llama", "ministral"])
def test_recorded_passes_on_a_device_that_is_not_the_cpu(family: str, tmp_path: Path) -> None:
    save(family, tmp_path)
    with elsewhere():
        target, twin, recorder = pair(tmp_path, device=NAME)
        with torch.inference_mode():  # such a device knows no views of tensors made outside, and pools grow there too
            scores = zip(play(target), play(twin), strict=True)
        for one, other in scores:
            assert one.logits.device.type == NAME and torch.equal(one.logits, other.logits)
            assert all(torch.equal(one.taps[i], other.taps[i]) for i in (0, 2))
    assert recorder.replays == 8


@pytest.mark.parametrize("family", ["llama", "ministral"])
def test_a_recording_holds_nothing_of_python(family: str, tmp_path: Path) -> None:
    """Rounds of one shape at other places, over pages that the storage gets and changes, by calls that were recorded once."""
    save(family, tmp_path)
    config = LoadConfig(dtype="float32", device=NAME, page_tokens=16, self_test=False, threads=torch.get_num_threads())
    with elsewhere():
        with recorded(Tape()) as tape:
            target = load_target(tmp_path, config)
        twin = load_target(tmp_path, config)
        with torch.inference_mode():
            for number in range(12):
                found = []
                for each in (target, twin):
                    if number % 6 == 0:
                        each.open([number, 1, 2], room=120, tenant=str(number))
                    guesses = torch.tensor([number, 5, 7]), ((-1, -1, 1) if number % 3 else (-1, 0, 1))
                    found.append(each.score(each.slots[-1:], torch.tensor([number + 3]), [Draft(*guesses)]).logits)
                    each.rewind(each.slots[-1], (1, 2) if number % 3 else (0, 1, 2))
                assert torch.equal(*found), number
    assert isinstance(target, PagedTarget) and isinstance(target.fused, GraphedPass)
    assert target.fused.record is tape and tape.replays == 12 > len(target.fused.held) > 1


def draft(draw: random.Random, shape: str) -> Draft:
    if shape == "none":
        return Draft.empty()
    nodes = draw.randint(1, 9)
    parents = [i - 1 if shape == "chain" else draw.randint(-1, i - 1) for i in range(nodes)]
    return Draft(torch.tensor([draw.randrange(200) for _ in range(nodes)]), tuple(parents))


def deepest(parents: tuple[int, ...]) -> list[int]:
    """A path from the root to the last node."""
    path, at = [], len(parents) - 1
    while at >= 0:
        path.append(at)
        at = parents[at]
    return path[::-1]


@pytest.mark.parametrize("family", ["llama", "ministral"])
def test_bits_through_many_rounds_of_chains_trees_and_growing_pages(family: str, tmp_path: Path, as_on_a_device: None) -> None:
    save(family, tmp_path)
    target, twin, recorder = pair(tmp_path)
    draw, made = random.Random(5), 0
    slots: list[list[Any]] = [[], []]
    for length in (3, 70, 20, 33):
        text = torch.tensor([draw.randrange(200) for _ in range(length)])
        for each, places in ((target, slots[0]), (twin, slots[1])):
            places.append(each.open(text.tolist(), tenant=str(length)))
            each.extend([places[-1]], [text])
    grown = target.pool.allocated
    for number in range(40):
        chosen = sorted(draw.sample(range(4), draw.randint(1, 4)))
        drafts = [draft(draw, draw.choice(["none", "chain", "tree"])) for _ in chosen]
        roots, taps = torch.tensor([draw.randrange(200) for _ in chosen]), draw.choice([(), (), (1,), (0, 2)])
        found = []
        for each, places in ((target, slots[0]), (twin, slots[1])):
            each.set_taps(taps)
            found.append(each.score([places[i] for i in chosen], roots, drafts))
            for i, one in zip(chosen, drafts, strict=True):
                each.rewind(places[i], deepest(one.parents) if number % 3 else ())
        assert torch.equal(found[0].logits, found[1].logits), number
        assert found[0].taps.keys() == found[1].taps.keys() == set(taps)
        assert all(torch.equal(found[0].taps[layer], found[1].taps[layer]) for layer in taps)
        made = max(made, len(recorder.made))
    assert target.pool.allocated > grown, "the storage moved on the way"
    assert recorder.replays > made > 2
    assert all(not store[:16].any() for kind in (target.pool.keys, target.pool.values) for store in kind.values()), "page 0 is nobody's"
    for each, places in ((target, slots[0]), (twin, slots[1])):
        for slot in places:
            each.close(slot)
        each.check()


def test_recordings_keep_no_model_alive(tmp_path: Path, as_on_a_device: None) -> None:
    """Nor does the collector have to find it, which does not look at what an engine froze."""
    save("llama", tmp_path)
    target, _, recorder = pair(tmp_path)
    play(target)
    assert isinstance(target.fused, GraphedPass) and target.fused.held and recorder.replays
    gone = [ref(target), ref(target.fused), ref(target.fused.layers[0])]
    recorder.made.clear()
    gc.collect()
    gc.disable()
    try:
        del target
        assert [one() for one in gone] == [None] * 3
    finally:
        gc.enable()


def test_what_is_returned_outlives_the_next_pass(tmp_path: Path, as_on_a_device: None) -> None:
    save("llama", tmp_path)
    target, _, _ = pair(tmp_path)
    target.set_taps([1])
    slot = target.open([1, 2, 3], room=20)
    kept = []
    for token in (5, 6):
        scores = target.score([slot], torch.tensor([token]), [Draft.chain([token + 1])])
        target.rewind(slot, ())
        kept.append((scores, scores.logits.clone(), scores.taps[1].clone()))
    for scores, logits, taps in kept:
        assert torch.equal(scores.logits, logits) and torch.equal(scores.taps[1], taps)
    assert not torch.equal(kept[0][1], kept[1][1])


def test_a_recording_is_made_once_for_what_it_fits(tmp_path: Path, as_on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    target, _, recorder = pair(tmp_path)
    assert isinstance(target.fused, GraphedPass)
    slot = target.open([1], room=100)

    def score(nodes: int) -> int:
        target.score([slot], torch.tensor([3]), [Draft.chain([4] * nodes)])
        target.rewind(slot, ())
        target.truncate(slot, 0)
        return len(recorder.made)

    assert [score(nodes) for nodes in (0, 1, 2, 3, 4, 0, 2, 4)] == [1, 1, 2, 2, 3, 3, 3, 3], "rows of a path: 2 (whole tiles), 4, 8"
    target.set_taps([1])
    assert score(0) == 4
    target.set_taps([])
    assert score(0) == 4
    others = [target.open([2], room=100, tenant=str(i)) for i in range(3)]  # the storage grows
    target.extend(others, [torch.arange(30)] * 3)
    before = len(recorder.made)
    assert score(0) == before + 1 and len(target.fused.held) == 1
    monkeypatch.setattr(graphs, "MOST_HELD", 2)
    assert [score(nodes) - before for nodes in (2, 4, 4, 2, 0)] == [2, 3, 3, 3, 4], "the one idle longest went"
    assert len(target.fused.held) == 2


def test_wide_and_large_passes_are_not_recorded(tmp_path: Path, as_on_a_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    target, twin, recorder = pair(tmp_path)
    text = torch.arange(200) % 190
    wide = [each.extend([each.open(text.tolist())], [text]).logits for each in (target, twin)]
    assert torch.equal(*wide) and not recorder.made
    monkeypatch.setattr(graphs, "MOST_ITEMS", 8)  # 200 tokens have 13 pages of 16
    long = [each.score(each.slots[-1:], torch.tensor([3]), [Draft.empty()]).logits for each in (target, twin)]
    assert torch.equal(*long) and not recorder.made


@pytest.mark.parametrize("way", ["a broken recorder", "no CUDA"])
def test_a_recording_that_fails_costs_nothing_but_a_warning(way: str, tmp_path: Path, as_on_a_device: None,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    if way == "no CUDA" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    save("llama", tmp_path)
    target, twin, _ = pair(tmp_path)
    assert isinstance(target.fused, GraphedPass)

    def broken(run: Run) -> Run:
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    target.fused.record = broken if way == "a broken recorder" else CudaRecorder(torch.device("cuda"))
    with caplog.at_level(logging.WARNING, "draftproof.models"):
        for one, other in zip(play(target), play(twin), strict=True):
            assert torch.equal(one.logits, other.logits)
    assert len(caplog.records) == 1 and not target.fused.held
    assert target.facts.reasons["passes"].startswith("one by one: a recording failed (")
    assert way == "no CUDA" or target.facts.reasons["passes"].endswith("stream is capturing)")


def test_layer_skip_records_its_own_passes(tmp_path: Path, as_on_a_device: None) -> None:
    save("llama", tmp_path)
    target, _, recorder = pair(tmp_path)
    sampling = Sampling(temperature=0.8, max_tokens=30, seed=3, ignore_eos=True)
    texts = []
    for spec in ("none", "layer-skip:exit=2"):
        with Engine(target, spec, 0 if spec == "none" else 3) as engine:
            texts.append(engine.generate([5, 9, 5], sampling).token_ids)
    assert texts[0] == texts[1]
    assert {len(recording.fused.layers) for recording in recorder.made} == {2, 3}
    assert isinstance(target.fused, GraphedPass) and all(one.fused is target.fused for one in target.fused.held.values())


def test_a_recorded_target_is_invisible_to_the_bit(tmp_path: Path, as_on_a_device: None) -> None:
    save("mistral", tmp_path)
    with recorded() as recorder:
        facts = load_target(tmp_path, LoadConfig(page_tokens=64, threads=torch.get_num_threads())).facts
    assert facts.invisible, facts.invisible_reason
    assert len(recorder.made) < 16 < recorder.replays


def test_what_is_recorded_and_why(tmp_path: Path, as_on_a_device: None) -> None:
    save("llama", tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False, threads=torch.get_num_threads()))
    assert isinstance(target, PagedTarget) and "passes" not in target.facts.reasons, "a processor has nothing to choose"
    assert load._recorder(torch.device("cpu")) is None and isinstance(load._recorder(torch.device("cuda:1")), CudaRecorder)
    reasons: dict[str, str] = {}
    assert type(passes(target.model, Recorder(), False, reasons)) is FusedPass and reasons == {"passes": "one by one: recording is off"}
    assert type(passes(target.model, None, True, {})) is FusedPass
    for layer in target.model.model.layers:
        layer.rope = layer.rope._replace(moves=True)
    assert type(passes(target.model, Recorder(), True, reasons)) is FusedPass and "rotary" in reasons["passes"]


def test_filling_up() -> None:
    assert [rounded(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128] and rounded(3, 64) == 64 and rounded(65, 64) == 128
    owner, place = ragged([2, 1, 3])
    assert owner.tolist() == [0, 0, 1, 2, 2, 2] and place.tolist() == [0, 1, 0, 0, 1, 2] and ragged([])[0].shape == (0,)
    assert BEYOND * 4096 < 2**63, "a position"


class Passes:
    """What a recording is filled for; nothing else of it is asked."""

    def __init__(self, seats: int) -> None:
        self.seats = seats


@pytest.mark.parametrize("bucket", [Bucket(5, 5, 3, 2, (2, 1), frozenset()), Bucket(8, 16, 4, 4, (4, 2), frozenset())])
@pytest.mark.parametrize("seats", [0, 2])
def test_a_recording_is_filled_up_with_what_is_there(bucket: Bucket, seats: int) -> None:
    """A chain of two rows, and a tree of three whose second leaf has a page of its own, under no window and one of two keys; as many as the
    bucket holds, and fewer. After another pass, of which nothing may be left. In seats of our kernels nobody sits where nothing is."""
    paths = [Along([9, 4], range(2)), Along([3], [2, 4]), Along([7], [3])]
    at, to = [5, 6, 1, 2, 2], [17, 18, 13, 14, 30]
    p = Pass(torch.tensor([[1, 2, 3, 4, 5]]), [5, 6, 1, 2, 2], at, torch.tensor(to), torch.tensor([0, 1, 2, 4, 3]), paths, 4, 1)
    spans = [[pages_seen([at[row] for row in path.rows], window, 4) for path in paths] for window in (0, 2)]
    assert spans == [[range(2), range(1), range(1)], [range(1, 2), range(1), range(1)]]
    passes = Passes(seats)
    recording = Recording(bucket, passes, p, None)  # type: ignore[arg-type]
    other = Pass(p.ids[:, :1], [0], [0], slice(0, 1), None, [Along([2], range(1))], 4, 1)
    recording.fill(other, [[range(1)], [range(1)]], [0])
    recording.fill(p, spans, [4, 0])

    def full(values: list[Any], count: int) -> list[Any]:
        return values + values[:1] * (count - len(values))

    assert recording.source.tolist() == full([0, 1, 2, 3, 4], bucket.rows)
    assert recording.ids.tolist() == [full([1, 2, 3, 4, 5], bucket.rows)]
    assert recording.positions.tolist() == recording.at.tolist() == full(at, bucket.rows)
    width = bucket.width
    assert recording.back.tolist() == full([0, 1, width, 2 * width, width + 1], bucket.rows)
    assert recording.keep.tolist() == full([4, 0], bucket.rows)
    assert recording.write_to.tolist() == full(to, bucket.writes) and recording.write_from.tolist() == full([0, 1, 2, 4, 3], bucket.writes)
    seated = [list(path.rows) + [-1] * (width - len(path.rows)) for path in paths]
    assert recording.take.view(-1, width).tolist() == (seated + [[-1] * width] * (bucket.paths - len(paths)) if seats
                                                       else full([full(list(path.rows), width) for path in paths], bucket.paths))
    for kind, seen in enumerate(spans):
        most = bucket.pages[kind]
        held = [[*path.pages[span.start:span.stop], *[0] * (most - len(span))] for path, span in zip(paths, seen, strict=True)]
        ranks = [[*span, *[BEYOND] * (most - len(span))] for span in seen]
        assert recording.pages[kind].view(-1, most).tolist() == full(held, bucket.paths)
        assert recording.ranks[kind].view(-1, most).tolist() == full(ranks, bucket.paths)


def test_where_rows_write_their_own_keys_those_that_fill_a_recording_up_write_none() -> None:
    p = Pass(torch.tensor([[1, 2, 3]]), [5, 6, 7], [5, 6, 7], slice(9, 12), None, [Along([9, 2], range(3))], 4, 1)
    passes = Passes(2)
    recording = Recording(Bucket(4, 4, 1, 4, (2,), frozenset(), True), passes, p, None)  # type: ignore[arg-type]
    recording.fill(p, [[range(2)]], [0, 1, 2])
    assert recording.write_to.tolist() == [9, 10, 11, -1] and recording.ids.tolist() == [[1, 2, 3, 1]]


def test_positions_wait_on_the_host_until_they_are_placed() -> None:
    """A graph reads them there as numbers; on the device that would be waited for."""
    p = Pass(torch.zeros(1, 3, dtype=torch.int64, device="meta"), [4, 5, 6], [4, 5, 6], slice(0, 3), None, [], 64, 1)
    assert p.positions.tolist() == [[4, 5, 6]]
    assert p.placed().positions.device.type == "meta"

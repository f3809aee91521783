"""One function from logits to the law: against a twin that is obviously right, bit for bit over row counts, threads and paths."""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from elsewhere import NAME, elsewhere
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftproof import choices, native
from draftproof.core import choice, host, noise, probs
from draftproof.core.choice import Law, choose, compiled, perturbed_top
from draftproof.core.edits import Counts, Rows
from draftproof.core.probs import distribution, laws
from draftproof.errors import Failure, OptionError
from draftproof.types import Sampling

PLAIN = Sampling(temperature=1.0, top_p=1.0)


def of(sampling: Sampling, n: int = 1, prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **more: Any) -> Rows:
    return Rows(**{"sampling": sampling, "text": prompt + output, "prompt_tokens": len(prompt), "paths": [()] * n, "end_ids": frozenset(),
                   **more})


def distribution_plain(logits: Tensor, g: Rows, row: int) -> Tensor:
    """The twin: one row, Python loops, a full sort, float64 all the way."""
    s, v = g.sampling, logits.shape[0]
    x = [float(a) for a in logits.double()]
    text = [*g.text, *g.paths[row]]
    written = text[g.prompt_tokens:]
    for t in range(v):
        if t in text and s.repetition_penalty != 1:
            x[t] = x[t] / s.repetition_penalty if x[t] > 0 else x[t] * s.repetition_penalty
        x[t] -= s.frequency_penalty * written.count(t) + s.presence_penalty * (t in written)
        x[t] += s.logit_bias.get(t, 0.0)
    for word in s.bad_word_ids:
        if len(word) == 1 or text[-(len(word) - 1):] == list(word[:-1]):
            x[word[-1]] = -math.inf
    for t in g.end_ids:
        if len(written) < s.min_tokens:
            x[t] = -math.inf
    if g.mask is not None:
        x = [a if ok else -math.inf for a, ok in zip(x, g.mask[row].tolist(), strict=True)]
    if s.temperature == 0:
        return torch.tensor([0.0 if t == x.index(max(x)) else -math.inf for t in range(v)])
    x = [(a - max(x)) / (1.0 if s.temperature is None else s.temperature) for a in x]
    order = sorted(range(v), key=lambda t: (-x[t], t))
    if s.top_k:
        order = [t for t in order if x[t] >= x[order[min(s.top_k, v) - 1]]]
    weight = {t: math.exp(x[t]) for t in order}
    total, mass, kept = sum(weight.values()), 0.0, []
    for t in order:
        if mass >= (1.0 if s.top_p is None else s.top_p) * total * (1 - 1e-6) and s.top_p not in (None, 1.0):
            break
        kept.append(t)
        mass += weight[t]
    if s.min_p:
        kept = [t for t in kept if x[t] >= math.log(s.min_p) - 1e-6]
    norm = math.log(sum(weight[t] for t in kept))
    return torch.tensor([x[t] - norm if t in set(kept) else -math.inf for t in range(v)])


def random_options(r: random.Random, v: int) -> Sampling:
    options = {
        "top_k": r.randrange(1, 2 * v), "top_p": r.choice([0.1, 0.5, 0.9, 0.95, 0.999]), "min_p": r.choice([0.01, 0.1, 0.5, 1.0]),
        "repetition_penalty": r.choice([0.8, 1.3]), "presence_penalty": r.uniform(-1, 1), "frequency_penalty": r.uniform(-1, 1),
        "logit_bias": {r.randrange(v): r.uniform(-3, 3), r.randrange(v): -math.inf},
        "bad_word_ids": ((r.randrange(v),), (1, 2), (0, 1, 3)), "min_tokens": r.randrange(6)}
    some = {name: value for name, value in options.items() if r.random() < 0.5}
    return Sampling.of(temperature=r.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.7, None]), **some)


def random_rows(r: random.Random, v: int, n: int) -> Rows:
    def some(k: int) -> list[int]:
        return [r.randrange(min(v, 6)) for _ in range(k)]

    mask = torch.rand(n, v) < 0.7 if r.random() < 0.3 else None
    if mask is not None:
        mask[:, -1] = True
    return Rows(random_options(r, v), some(5 + r.randrange(4)), 5, [some(i % 4) for i in range(n)], frozenset({0, 4}), mask)


def random_logits(r: random.Random, n: int, v: int) -> Tensor:
    x = torch.randn(n, v) * r.choice([0.3, 1.0, 3.0])
    return r.choice([x, x.round(), (x * 2).round() / 2, x.bfloat16(), x.double()])     # rounded logits: ties everywhere


@pytest.mark.parametrize("v, times", [(5, 250), (40, 150), (400, 60)])
def test_agrees_with_the_plain_twin_over_random_options(v: int, times: int) -> None:
    r = random.Random(v)
    torch.manual_seed(v)
    kept = 0
    for _ in range(times):
        groups = [random_rows(r, v, r.randrange(1, 4)) for _ in range(r.randrange(1, 4))]
        logits = random_logits(r, sum(len(g.paths) for g in groups), v)
        want = []
        owners = [(g, i) for g in groups for i in range(len(g.paths))]
        try:
            want = [distribution_plain(x, g, i) for x, (g, i) in zip(logits, owners, strict=True)]
        except (ValueError, OverflowError):      # the twin has no answer: everything is excluded
            pass
        if not want or any(w.isnan().any() for w in want):
            with pytest.raises(OptionError, match=r"exclude every token|grammar allows no token"):
                distribution(logits, groups)
            continue
        got = distribution(logits, groups)
        assert got.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.isinf(), b.isinf())
            torch.testing.assert_close(a.double().exp(), b.double().exp(), rtol=2e-5, atol=1e-7)
            kept += int(a.isfinite().sum())
    assert kept > times, "the test saw real distributions"


def test_logits_are_left_alone() -> None:
    x = torch.randn(3, 50)
    before = x.clone()
    distribution(x, [of(Sampling(temperature=0.5, top_p=0.9, repetition_penalty=2.0, logit_bias={3: 9.0}), 3, prompt=(1, 2))])
    assert torch.equal(x, before)


def hard_rows(n: int, v: int) -> Tensor:
    """Rows of many kinds: peaked, flat, full of ties, nearly one-hot."""
    x = torch.randn(n, v, generator=torch.Generator().manual_seed(v)) * 3
    x[1::4] /= 10
    x[2::4] = x[2::4].bfloat16().float()
    x[3::4, ::997] += 15
    return x


FILTERS = [PLAIN, Sampling(temperature=0.7, top_p=1.0), Sampling(temperature=1.0, top_p=0.95),
           Sampling(temperature=0.7, top_p=0.6, min_p=0.01), Sampling(temperature=1.3, top_k=50, top_p=0.9),
           Sampling(temperature=1.0, top_k=3000, top_p=1.0), Sampling(temperature=0.9, min_p=0.001, top_p=1.0)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread unless a test asks for more: quick on a busy machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("v", [4096, 32000, 128256])
def test_a_rows_bits_do_not_depend_on_other_rows_or_threads(v: int) -> None:
    x = hard_rows(17 if v < 100_000 else 9, v)
    keys = noise.key_rows([noise.key(5, 0, "text", i) for i in range(len(x))], "cpu")
    for s in FILTERS if v < 100_000 else FILTERS[1:4]:
        torch.set_num_threads(1)
        alone = torch.cat([distribution(x[i:i + 1].clone(), [of(s)]) for i in range(len(x))])
        picked = torch.cat([choose(alone[i:i + 1], keys[i:i + 1]) for i in range(len(x))])
        for count, n in ((1, 2), (1, 5), (1, len(x)), (2, 1), (2, 5)):
            torch.set_num_threads(count)
            start = len(x) - n
            got = distribution(x[start:].clone(), [of(s, n)])
            assert torch.equal(got, alone[start:]), (s, n, count)
            assert torch.equal(choose(got, keys[start:]), picked[start:])


@pytest.mark.parametrize("kernel", ["log_softmax", "cumsum"])
@pytest.mark.parametrize("v", [4096, 32000, 128256])
def test_the_kernels_this_rests_on_work_row_by_row(kernel: str, v: int) -> None:
    x = hard_rows(17, v)

    def run(rows: Tensor) -> Tensor:
        return torch.log_softmax(rows, -1) if kernel == "log_softmax" else rows.double().exp().cumsum(-1)

    torch.set_num_threads(1)
    alone = torch.cat([run(x[i:i + 1].clone()) for i in range(17)])
    if kernel == "cumsum":       # sequential: a prefix of the sums is the sum of the prefix
        assert torch.equal(run(x[:, :300].clone()), alone[:, :300])
    for count in (1, 2):
        torch.set_num_threads(count)
        for n in (1, 2, 5, 17):
            assert torch.equal(run(x[17 - n:].clone()), alone[17 - n:])


def test_mixed_requests_give_each_row_what_it_gets_alone() -> None:
    x = hard_rows(len(FILTERS) * 2, 4096)
    groups = [of(s, 2) for s in FILTERS]
    together = distribution(x, groups)
    for i, g in enumerate(groups):
        assert torch.equal(together[2 * i:2 * i + 2], distribution(x[2 * i:2 * i + 2], [g]))


def test_a_drafted_path_and_the_same_path_as_text_give_the_same_bits() -> None:
    s = Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.17, presence_penalty=0.3, frequency_penalty=0.21,
                 bad_word_ids=((7, 8, 9), (5,)), min_tokens=6)
    x = hard_rows(5, 4096)
    prompt, output, path = (1, 2, 7), (3, 3, 4), (8, 3, 9, 4)
    tree = distribution(x, [Rows(s, prompt + output, 3, [path[:i] for i in range(5)], frozenset({11}))])
    for i in range(5):
        text = distribution(x[i:i + 1], [Rows(s, prompt + output + path[:i], 3, [()], frozenset({11}))])
        assert torch.equal(tree[i:i + 1], text)


@pytest.mark.parametrize("s", FILTERS[2:], ids=str)
@pytest.mark.parametrize("v", [4096, 32000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_the_kept_tokens_gives_the_same_bits(s: Sampling, v: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the kernel, which may find room for all, for few or for none, and, as without a compiler, in numpy."""
    x = hard_rows(8, v).to(dtype)
    usual = distribution(x, [of(s, 8)])
    for known, floor, long, room in ((v, -10.0, v, 1024), (1, -10.0, 0, 1024), (1, -math.inf, 0, 8), (2000, -1.0, v, v), (128, -10.0, 0, 0),
                                     (128, -10.0, v + 1, 100)):
        monkeypatch.setattr(host, "FEW", known)
        monkeypatch.setattr(host, "FLOOR", floor)
        monkeypatch.setattr(host, "LONG", long)
        monkeypatch.setattr(host, "ROOM", room)
        for kernels in (compiled, lambda *_: False):
            monkeypatch.setattr(probs, "compiled", kernels)
            assert torch.equal(distribution(x, [of(s, 8)]), usual), (known, floor, room, kernels)


@pytest.mark.parametrize("s", FILTERS[2:], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_one_by_one_and_sorted_whole_have_one_law(s: Sampling, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a processor and the way of a device: the same tokens, logarithms equal up to their last bit."""
    x = hard_rows(12, 4096).to(dtype)
    mine = distribution(x, [of(s, 12)])
    monkeypatch.setattr(probs, "_SHORT", 4096)
    device = distribution(x, [of(s, 12)])
    assert torch.equal(mine.isfinite(), device.isfinite())
    torch.testing.assert_close(mine.exp(), device.exp(), rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize("s", FILTERS[2:], ids=str)
@pytest.mark.parametrize("few", [16, 64, 1024, 4096])
def test_the_likeliest_few_give_the_law_of_whole_rows_or_say_that_they_are_too_few(s: Sampling, few: int,
                                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a device with long rows. To the bit, as sums run over the same prefix here."""
    x = hard_rows(12, 4096)
    monkeypatch.setattr(probs, "_THERE", few)
    f, top = probs._filters(s, 4096), x.amax(-1, keepdim=True)
    if f.top_k > few // 2:
        return
    total = None if f.top_k or f.top_p == 1 else torch.log_softmax(x / f.temperature, -1).amax(-1, keepdim=True).double().neg().exp()
    whole, found = probs._sorted(x, top, total, f), probs._topmost(x, top, total, f)
    assert found.short is not None and found.few is not None and found.few[0].shape[1] == few
    for row, (mine, short) in enumerate(zip(found.whole, found.short.tolist(), strict=True)):
        kept = whole[row].isfinite()
        last = x[row].topk(few).values[-1]
        assert short == bool((kept & (x[row] <= last)).any()), "who keeps the last, or one beyond it"
        assert short or torch.equal(mine, whole[row])
    found.thorough = lambda: Law(4096, whole)
    assert torch.equal(found.sure().whole, whole) and (found.sure() is found) == (not any(found.short.tolist()))


@pytest.mark.parametrize("few", [8, 1024])
def test_a_device_chooses_what_a_processor_does(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several requests and of one, under noise, with shared keys and other names; looks that are too short are remade."""
    monkeypatch.setattr(probs, "_THERE", few)
    monkeypatch.setattr(probs, "_WIDE", 1024)
    x = hard_rows(6, 4096)
    keys = noise.key_rows([noise.key(3, 0, "text", i) for i in range(6)], "cpu")
    names, short = torch.arange(4096) * 3 + 1, []
    for some in ([FILTERS[2]], [FILTERS[4]], [Sampling(temperature=0.9, top_k=4)], [FILTERS[2], PLAIN, Sampling(temperature=0.0)]):
        groups = [of(s, 6 // len(some)) for s in some]
        here = laws(x, groups)
        with elsewhere():
            there = laws(x.to(NAME), groups)
            short.append(there.short is not None and bool(there.short.any()))
            there = there.sure()
            for ids in (None, names):
                for drawn, counts in ((keys, None), (keys[:3], [2, 2, 2]), (keys[:3], [1, 2, 3])):
                    for k in (1, 3):
                        values, columns = perturbed_top(there, drawn.to(NAME), k, None if ids is None else ids.to(NAME), counts)
                        expected, places = perturbed_top(here, drawn, k, ids, counts)
                        real = expected > -math.inf
                        assert torch.equal(columns.to("cpu")[real], places[real])
                        assert torch.equal(values.to("cpu").isfinite(), real)
            assert torch.allclose(there.of([1, 3]).whole.to("cpu").exp(), here.of([1, 3]).whole.exp(), rtol=1e-6, atol=0)
    assert any(short), "otherwise nothing was remade"


@pytest.mark.parametrize("way", ["torch", "compiled"])
@pytest.mark.parametrize("v", [300, 4096, 70_001])
def test_a_drafters_filters_keep_what_the_exact_ones_do_or_everything(way: str, v: int) -> None:
    """Of rows without ties. How many may be kept at most is each way's own; beyond that a law stays as it is."""
    if way == "compiled" and not native.available()[0]:
        pytest.skip(native.available()[1])
    x = torch.randn(4, v, generator=torch.Generator().manual_seed(v)) * torch.tensor([[1.0], [3.0], [9.0], [3.0]])
    x[3, torch.rand(v, generator=torch.Generator().manual_seed(1)) < 0.99] = -math.inf
    law, most, narrow = x.log_softmax(-1), choice.LIKELY if way == "torch" else 1024, 0
    for top_k, top_p, min_p in ((0, 0.9, 0.0), (0, 0.3, 0.0), (5, 1.0, 0.0), (40, 0.8, 0.0), (0, 1.0, 0.1), (50, 0.95, 0.02), (0, 1, 0)):
        exact = distribution(x, [of(Sampling(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p), 4)])
        fall = math.log(min_p) if min_p else -math.inf
        if way == "torch":
            found = choice.narrowed(law, *(torch.tensor([each] * 4) for each in (top_k, top_p, fall)))
        else:
            found, library = law.clone(), native.loaded()
            library.narrow.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 2, ctypes.POINTER(choices.Filters), ctypes.c_int]
            library.narrow(found.data_ptr(), 4, v, choices.Filters.of(1.0, top_k, top_p, min_p), 2)
        for mine, wanted, before in zip(found, exact, law, strict=True):
            whole = torch.equal(mine, before)
            assert torch.equal(mine.isfinite(), wanted.isfinite()) and torch.allclose(mine.exp(), wanted.exp(), rtol=1e-5) or whole
            assert not whole or wanted.isfinite().sum() > most // 9 or torch.equal(wanted.isfinite(), before.isfinite())
            narrow += not whole
    assert narrow > 12


def test_top_p_cuts_ties_by_id_and_top_k_keeps_them() -> None:
    x = torch.zeros(1, 4096)
    x[0, 1000:1300] = 5.0                        # 300 equal tokens: wherever the cut falls, it falls between equals
    kept = distribution(x, [of(Sampling(temperature=1.0, top_p=0.5))])[0].isfinite().nonzero()[:, 0]
    mass = (torch.softmax(x[0].double(), -1))
    assert kept.tolist() == list(range(1000, 1000 + len(kept)))
    assert mass[kept].sum() >= 0.5 > mass[kept[:-1]].sum()
    assert int(distribution(x, [of(Sampling(temperature=1.0, top_k=7, top_p=1.0))]).isfinite().sum()) == 300


@pytest.mark.parametrize("p, s, kept", [
    ((0.5, 0.25, 0.25), {"top_p": 0.5}, [0]), ((0.25, 0.25, 0.5), {"top_p": 0.75}, [0, 2]), ((0.25,) * 4, {"top_p": 0.5}, [0, 1]),
    ((0.5, 0.25, 0.25), {"top_p": 1.0, "min_p": 0.5}, [0, 1, 2]), ((0.5, 0.3, 0.2), {"top_k": 2, "top_p": 0.625}, [0]),
    ((0.4, 0.3, 0.3), {"top_p": 1e-9}, [0])])
def test_thresholds_are_reached_within_the_precision_of_the_type(p: tuple[float, ...], s: dict[str, float], kept: list[int]) -> None:
    for dtype in (torch.float32, torch.float64):
        x = torch.tensor([p], dtype=torch.float64).log().to(dtype)
        assert distribution(x, [of(Sampling.of(temperature=1.0, **s))])[0].isfinite().nonzero()[:, 0].tolist() == kept


def test_min_tokens_bad_words_and_masks_act_along_each_path() -> None:
    x = torch.zeros(3, 6)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[2, 0] = False
    sampling = replace(PLAIN, min_tokens=2, bad_word_ids=((1, 2),))
    g = Rows(sampling, (1,), 1, [(), (1,), (1, 4)], frozenset({5, 99}), mask)
    allowed = [r.isfinite().nonzero()[:, 0].tolist() for r in distribution(x, [g])]
    assert allowed == [[0, 1, 3, 4], [0, 1, 3, 4], [1, 2, 3, 4, 5]]


def test_extreme_temperatures_stay_finite() -> None:
    x = hard_rows(4, 4096) * 1e9
    for t in (1e-300, 1e-30, 1e-4, 1e4):
        for s in (Sampling(temperature=t, top_p=1.0), Sampling(temperature=t, top_p=0.9)):
            got = distribution(x, [of(s, 4)])
            assert not got.isnan().any() and torch.allclose(got.double().exp().sum(-1), torch.ones(4, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("s, mask, message", [
    (Sampling(temperature=0.0), torch.zeros(1, 4, dtype=torch.bool), "grammar allows no token"),
    (replace(PLAIN, bad_word_ids=((0,), (1,), (2,), (3,))), None, "exclude every token"),
    (replace(PLAIN, logit_bias={9: 1.0}), None, r"logit_bias names token 9; expected ids in \[0, 4\)"),
    (replace(PLAIN, logit_bias={1: math.inf}), None, r"logit_bias holds \+inf")])
def test_what_cannot_be_sampled_is_refused(s: Sampling, mask: Tensor | None, message: str) -> None:
    for others in ([], [of(PLAIN, mask=torch.ones(1, 4, dtype=torch.bool))]):                   # behind one that can be, too
        with pytest.raises(OptionError, match=message):
            distribution(torch.zeros(len(others) + 1, 4), [*others, of(s, mask=mask)])


def dead_end(last: int, options: Sampling) -> tuple[Rows, Rows]:
    """Two sequences of three and two rows over four tokens: the rows at 1 and 4 have no token, each other row has."""
    sampling = replace(options, bad_word_ids=tuple((3, token) for token in range(4)))
    return of(sampling, paths=[(), (3,), (2,)], prompt=(last,)), of(sampling, paths=[(), (1, 3)], prompt=(0,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("other", [{}, {"top_k": 2}, {"temperature": 0.0}, {"top_p": 0.5}], ids=str)
def test_a_dead_end_that_only_a_guess_leads_to_is_told_and_moves_no_other_row(other: dict[str, Any], dtype: torch.dtype) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(dtype)
    first, second = dead_end(0, PLAIN)[0], dead_end(0, replace(PLAIN, **other))[1]
    law = laws(x, [first, second], (0, 3))
    assert law.dead == [1, 4] and law.of([4, 0, 1]).dead == [0, 2] and law.of([0, 3]).dead == []
    assert torch.allclose(law.whole.exp().sum(1), torch.ones(5, dtype=dtype)), "a law stands in every row"
    for row, group, path in ((0, first, ()), (2, first, (2,)), (3, second, ())):
        assert torch.equal(law.whole[row], distribution(x[row:row + 1], [replace(group, paths=[path])])[0])
    assert torch.equal(x, torch.randn(5, 4, generator=torch.Generator().manual_seed(1)).to(dtype))


def test_a_dead_end_where_the_text_stands_is_refused() -> None:
    for due in (None, (0, 3), (4,)):
        with pytest.raises(OptionError, match="exclude every token"):
            laws(torch.zeros(5, 4), dead_end(3, PLAIN), due)
    assert laws(torch.zeros(5, 4), dead_end(3, PLAIN), (3,)).dead == [0, 1, 4]


def test_a_pass_that_overflowed_behind_a_guess_only_is_a_dead_end() -> None:
    x = torch.zeros(3, 4)
    x[1, 2] = math.nan
    law = laws(x, [of(PLAIN, 3)], (0,))
    assert law.dead == [1] and torch.equal(law.whole[[0, 2]], torch.full((2, 4), 0.25).log()) and x[1, 2].isnan()


@pytest.mark.parametrize("s", [PLAIN, Sampling(temperature=0.0)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_model_that_overflowed_is_reported(bad: float, s: Sampling) -> None:
    x = torch.zeros(2, 4)
    x[1, 2] = bad
    with pytest.raises(Failure, match="row 1: the largest logit is"):
        distribution(x, [of(s, 2)])


# The choice.


def top_plain(logp: Tensor, keys: Tensor, k: int, ids: Sequence[int]) -> tuple[list[list[float]], list[list[int]]]:
    values, columns = [], []
    for row, own in zip(logp, keys, strict=True):
        g = noise.gumbel(own[None], torch.tensor(ids))[0]
        score = (row + g).tolist()
        best = sorted(range(len(score)), key=lambda c: (-score[c], c))[:k]
        values.append([score[c] for c in best])
        columns.append(best)
    return values, columns


@pytest.fixture(params=["compiled", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whole rows through the compiled kernel and, as without a compiler, through numpy."""
    if request.param == "numpy":
        monkeypatch.setattr(choice, "compiled", lambda rows: False)
    elif not native.available()[0]:
        pytest.skip(native.available()[1])
    return str(request.param)


@pytest.mark.parametrize("v", [7, 4096, 32000])
@pytest.mark.parametrize("s", [PLAIN, FILTERS[2], FILTERS[4], FILTERS[5], Sampling(temperature=0.0)], ids=str)
def test_sparse_dense_and_pruned_choices_agree_with_the_plain_twin(way: str, s: Sampling, v: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = hard_rows(8, v)
    logp = distribution(x, [of(s, 8)])
    keys = noise.key_rows([noise.key(3, 0, "text", i) for i in range(8)], "cpu")
    names = (torch.arange(v) * 3 + 1)
    for ids in (names, None):
        values, columns = top_plain(logp, keys, 4, range(v) if ids is None else ids.tolist())
        for k in (1, 4):
            for dense in (0, 16_384, v) if way == "numpy" else (0,):
                monkeypatch.setattr(choice, "_DENSE", max(dense, 128))
                got, where = perturbed_top(logp, keys, k, ids)
                assert got.tolist() == [best[:k] for best in values]
                real = got > -math.inf
                assert torch.equal(where[real], torch.tensor(columns)[:, :k][real])
                assert int(real.sum(-1).min()) == min(k, int(logp.isfinite().sum(-1).min()))
    assert torch.equal(choose(logp, keys), torch.tensor(columns)[:, 0])


@pytest.mark.usefixtures("way")
def test_pruning_is_never_too_bold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few likely tokens with large u, where the bound is loose: whoever it raises above the winner must be looked at."""
    generator = torch.Generator().manual_seed(1)
    logp = torch.full((400, 600), -30.0)
    logp[:, 100:104] = torch.randn(400, 4, generator=generator)
    keys = noise.key_rows([noise.key(1, 0, "text", i) for i in range(400)], "cpu")
    scores = logp + noise.gumbel(keys, torch.arange(600))
    monkeypatch.setattr(choice, "_DENSE", 128)
    assert torch.equal(choose(logp, keys), scores.argmax(-1))
    for k in (2, 3, 9):
        assert torch.equal(perturbed_top(logp, keys, k)[1], scores.topk(k).indices)
    reach = torch.from_numpy(host.bound(keys.numpy().view(np.uint32), None, 600))
    assert not torch.equal((logp + reach).argmax(-1), scores.argmax(-1)), "in some rows the highest bound is not the winner's"


@pytest.mark.usefixtures("way")
def test_ties_go_to_the_lowest_id() -> None:
    x = torch.zeros(2, 500)
    x[:, 40::7] = 3.0
    assert choose(torch.log_softmax(x, -1), None).tolist() == [40, 40]
    assert choose(distribution(x, [of(Sampling(temperature=0.0), 2)]), None).tolist() == [40, 40]
    for dtype in (torch.float32, torch.float64):
        assert perturbed_top(x.to(dtype), None, 4)[1].tolist() == [[40, 47, 54, 61]] * 2
    zeros = torch.tensor([[-0.0, 0.0, -1.0]])
    assert perturbed_top(zeros, None, 2)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 2, 2), (2, 2), (3, 1, 2), (1, 4)])
def test_rows_that_share_a_key_have_its_noise(counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each had the key for itself: by the kernel, from bounds, and with noise for whole rows."""
    logp = torch.randn(sum(counts), 50, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    keys = noise.key_rows([noise.key(5, 0, "draft", at) for at in range(len(counts))], "cpu")
    each = keys[[i for i, count in enumerate(counts) for _ in range(count)]]
    for kernel, dense in ((True, 0), (False, 0), (False, 50)):
        if not kernel:
            monkeypatch.setattr(choice, "compiled", lambda *_: False)
        monkeypatch.setattr(choice, "_DENSE", dense)
        for found, want in zip(perturbed_top(logp, keys, 3, counts=counts), perturbed_top(logp, each, 3), strict=True):
            assert torch.equal(found, want)


@pytest.mark.usefixtures("way")
def test_too_few_tokens_end_in_minus_infinity() -> None:
    logp = torch.full((1, 40_000), -math.inf)
    logp[0, 17] = 0.0
    keys = noise.key_rows([(1, 2)], "cpu")
    values, columns = perturbed_top(logp, keys, 3)
    assert columns[0, 0] == 17 and values[0, 1:].tolist() == [-math.inf] * 2 and len(set(columns[0].tolist())) == 3


def test_the_choice_follows_the_law() -> None:
    """False alarm 1e-6: chi-square over 40,000 positions of a law with 5 tokens; a wrong law of 2 % must fail."""
    stats = pytest.importorskip("scipy.stats")
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    n = 40_000
    keys = noise.shared_rows([(9, 0)] * n, range(n), "cpu")
    counts = torch.bincount(choose(p.log().float().expand(n, 5).contiguous(), keys), minlength=5).double()

    def alarm(law: Tensor) -> float:
        return float(stats.chi2.sf(float(((counts - n * law) ** 2 / (n * law)).sum()), 4))

    assert alarm(p) > 1e-6
    assert alarm(p + torch.tensor([0.02, -0.02, 0, 0, 0])) < 1e-6


@pytest.mark.parametrize("v, k", [(50, 1), (50, 3), (50, 7), (4096, 4), (4096, 128), (33_001, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_largest_are_those_of_a_whole_sort(v: int, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(v)
    x = torch.randn(4, v, dtype=dtype)
    x[1] = (x[1] * 2).round()                                          # many ties
    x[2, torch.randperm(v)[k // 2 + 1:]] = -math.inf                   # fewer possible tokens than are asked for
    x[3] = 0.0
    x[3, ::2] = -0.0
    found = host.largest(x.numpy(), k).tolist()
    for row, mine in zip(x, found, strict=True):
        order = sorted(range(v), key=lambda c, row=row: (-row[c].item(), c))[:k]
        assert mine == order
        if k > 1 and dtype == torch.float32:                           # the way of a device
            assert choice.ranks(row[None], torch.arange(v)).topk(k).indices[0].tolist() == order


def test_long_rows_are_ranked_as_short_ones_are() -> None:
    x = hard_rows(4, 5000).numpy()
    x[2, ::5] = np.inf
    x[3, ::2], x[3, 1::2] = 0.0, -0.0
    for row in x:
        assert np.array_equal(host._rising(row), row.argsort(kind="stable"))
        assert np.array_equal(host._rising(row.astype(np.float64)), row.argsort(kind="stable"))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("s", [*FILTERS[2:], Sampling(temperature=0.0)], ids=str)
@pytest.mark.parametrize("v", [300, 4096, 32_000])
def test_the_few_columns_hold_every_possible_token_and_change_no_choice(s: Sampling, v: int) -> None:
    torch.manual_seed(v)
    law = laws(torch.randn(4, v) * 4, [of(s, 4)])
    if law.few is None:
        pytest.skip("nothing is known about these rows")
    columns, values = law.few
    some = law.of([2, 0])
    possible = [(row > -math.inf).nonzero()[:, 0].tolist() for row in law.whole]
    assert [sorted(c for c in row if c >= 0) for row in columns.tolist()] == possible
    assert torch.equal(torch.where(columns < 0, -math.inf, law.whole.gather(1, columns.clamp(min=0))), values)
    assert torch.equal(some.whole, law.whole[[2, 0]])
    for keys in (None, noise.key_rows([noise.key(i, 0, "text", 9, 0) for i in range(4)], "cpu")):
        for k in (1, min(3, columns.shape[1])):
            known, blind = perturbed_top(law, keys, k), perturbed_top(law.whole, keys, k)
            real = blind[0] > -math.inf
            assert torch.equal(known[0], blind[0]) and torch.equal(known[1][real], blind[1][real])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("v", [5, 300, 4096])
def test_a_row_without_any_token_left_has_no_winner(v: int) -> None:
    """A drafter whose vocabulary the options exclude: values of −inf, beside a row that has its token."""
    logp = torch.full((2, v), -math.inf)
    logp[1, 3] = 0.0
    keys = noise.key_rows([noise.key(1, 0, "text", i) for i in range(2)], "cpu")
    for rows, own in ((logp, keys), (logp[:1], keys[:1])):
        for k in (1, 3):
            values, columns = perturbed_top(rows, own, k)
            assert (values[0] == -math.inf).all() and columns.min() >= 0 and columns.max() < v
            assert len(rows) == 1 or (columns[1, 0] == 3 and values[1, 0] > -math.inf and (values[1, 1:] == -math.inf).all())


def test_counts_read_on_and_begin_anew() -> None:
    r, v = random.Random(5), 50
    s = Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1)
    text, counts, x = [1, 2, 2, 60], Counts(), hard_rows(3, v)
    for step in range(60):
        if step % 7 == 6:
            text = text[:r.randrange(4, len(text) + 1)]
            text = text if step % 2 else [*text[:4]]
        else:
            text += [r.randrange(v + 2) for _ in range(r.randrange(4))]
        paths = [(), (r.randrange(v),), (r.randrange(v), 3)]
        used = replace(s, repetition_penalty=1.0) if step > 40 else s
        fresh = distribution(x, [Rows(used, text, 4, paths, frozenset())])
        assert torch.equal(distribution(x, [Rows(used, text, 4, paths, frozenset(), counts=counts)]), fresh)


def test_the_shares_of_some_columns_are_those_of_the_whole_law() -> None:
    """Of laws that filters left few tokens of, and of whole ones."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * 3
    columns = torch.cat([logits.topk(6).indices, torch.tensor([[0, 4999]] * 4)], 1)
    for options in ({"top_k": 9}, {"top_p": 0.8}, {"top_p": 1.0}):
        law = laws(logits, [Rows(Sampling(temperature=0.7, **options), [1, 2], 1, ((),) * 4, frozenset())])
        assert (law.few is None) == (options == {"top_p": 1.0})
        found = law.at(columns)
        assert torch.equal(found, law.whole.gather(1, columns)) and bool((found[:, 0] > -math.inf).all())


class Asked(TorchDispatchMode):
    """Names of all that torch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_device_is_asked_for_greedy_choices_and_nothing_else(dtype: torch.dtype) -> None:
    """Of equal logits the first, as on a processor; no copy of all logits in another type, and none of their largest."""
    x = (torch.randn(5, 90, generator=torch.Generator().manual_seed(0)) * 4).round().to(dtype)
    groups = [of(Sampling(temperature=0), n) for n in (1, 3, 1)]
    here = laws(x if dtype != torch.bfloat16 else x.float(), groups)
    with elsewhere(), Asked() as asked:
        there = laws(x.to(NAME), groups)
        chosen = choose(there, None)
        whole = there.whole
    assert chosen.tolist() == choose(here, None).tolist() == [int((row == row.max()).nonzero()[0]) for row in x.float()]
    assert whole.to("cpu").tolist() == here.whole.tolist() and whole.dtype == here.whole.dtype
    assert "argmax.default" in asked.names and "amax.default" not in asked.names
    assert asked.names.count("_to_copy.default") <= 1, "the rows themselves, on their way there"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_temperature_is_too_hot(dtype: torch.dtype) -> None:
    """Beyond what the logits' type can hold a division would be one by infinity, and of a ban no number. Ordinary ones keep their bits."""
    logits = torch.tensor([[1.0, 2.0, 3.0, -4.0]]).to(dtype)
    for temperature in (1e38, 1e39, 1e300):
        for options in ({"logit_bias": {0: -math.inf}}, {"top_p": 0.9}, {"top_k": 2}, {}):
            s = Sampling(**{"temperature": temperature, "top_p": 1.0, **options})
            law = distribution(logits, [of(s)])[0]
            kept = law[law > -math.inf].exp()
            assert not law.isnan().any() and torch.allclose(kept, torch.full_like(kept, 1 / len(kept))), (temperature, options)

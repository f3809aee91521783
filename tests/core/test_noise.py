"""The noise: pinned to the bit, equal in both twins and at every place of a tensor, and indistinguishable from independent draws.

The statistical battery gives p-values at fixed seeds and passes if the least is above 1e-6 / their number: a false-alarm rate
of at most 1e-6 for the whole battery, were the seeds drawn afresh. Two plausible but bad hashes must fail the same battery.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from draftproof.core import host, noise

stats = pytest.importorskip("scipy.stats")

VECTORS = [
    ((0, 0, "text", 0, 0), (0x6B5FD45E, 0x78AE5A9A), (0xFE97ADB4, 0xD015AA68, 0x3201C35D)),
    ((1, 0, "text", 7, 0), (0x74FFA12B, 0xFE0CAA68), (0xBFC6FC35, 0x95CD37C7, 0x327EDF60)),
    ((1, 3, "draft", 7, 2), (0xF36B4032, 0x081A6963), (0x27C41419, 0x23A297F0, 0x235C467C)),
    ((2**63 - 1, 1, "residual", 131071, 1), (0xDC7C15D0, 0x6194B84C), (0xBBA263C6, 0xC0312A60, 0x9F9CFEE3)),
]


def unsigned(x: Tensor) -> Tensor:
    return x.long() & 0xFFFFFFFF


@pytest.mark.parametrize("few", [-1, noise.FEW], ids=["torch", "numpy"])
@pytest.mark.parametrize("words, row, h", VECTORS)
def test_published_vectors(words: tuple[int, int, str, int, int], row: tuple[int, int], h: tuple[int, int, int], few: int,
                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "FEW", few)
    assert noise.key(*words) == row
    keys = noise.key_rows([row], "cpu")
    assert keys.tolist() == [[word - 2**32 * (word >> 31) for word in row]]         # their bits, as int32
    assert tuple(unsigned(noise.bits(keys, torch.tensor([0, 1, 128255])))[0].tolist()) == h
    assert noise.__doc__ is not None
    for value in (*row, *h):
        assert f"{value:#010x}" in noise.__doc__


def test_values_follow_from_the_bits() -> None:
    keys, tokens = noise.key_rows([noise.key(4, 0, "coin", 3)], "cpu"), torch.arange(5000)
    h = unsigned(noise.bits(keys, tokens))[0].tolist()
    u = [(a + 0.5) / 2**32 for a in h]
    e = torch.tensor([-math.log1p(-a) for a in u], dtype=torch.float64).float()
    assert noise.uniform(keys, tokens)[0].tolist() == u
    assert torch.equal(noise.exponential(keys, tokens)[0], e)
    assert torch.equal(noise.gumbel(keys, tokens)[0], torch.tensor([-math.log(a) for a in e.tolist()], dtype=torch.float64).float())


def test_the_processors_twin_draws_the_same_bits() -> None:
    """A million tokens: every float32 is equal, although the float64 logarithms before it come from another library."""
    tokens = torch.arange(1_000_003)
    for words in ((4, 0, "coin", 3, 0), (2**63 - 1, 1, "residual", 131071, 1)):
        keys = noise.key_rows([noise.key(*words)], "cpu")
        key = keys.numpy().view(np.uint32)
        assert np.array_equal(host.bits(key, tokens.numpy()), noise.bits(keys, tokens).numpy().view(np.uint32))
        assert np.array_equal(host.gumbel(key, tokens.numpy()), noise.gumbel(keys, tokens).numpy())
        assert (host.bound(key, None, 1_000_003) > host.gumbel(key, tokens.numpy()) - host._MARGIN).all()


@pytest.mark.parametrize("kernel", [np.exp, np.log, lambda a: np.log1p(-a)], ids=["exp", "log", "log1p"])
def test_numpys_kernels_are_the_same_at_every_place(kernel: Callable[[np.ndarray], np.ndarray]) -> None:
    u = np.random.default_rng(0).random(100_003)
    whole = kernel(u)
    for start in range(0, 100_000, 1_999):
        for width in (1, 2, 3, 5, 7, 13):
            assert np.array_equal(kernel(u[start:start + width].copy()), whole[start:start + width])
            assert np.array_equal(kernel(u[start:start + width]), whole[start:start + width])


def test_the_ends_of_the_range_are_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "bits", lambda keys, tokens: torch.tensor([[0, -1, -(2**31)]], dtype=torch.int32))
    none = torch.empty(0)
    assert noise.uniform(none, none).tolist() == [[2.0**-33, 1 - 2.0**-33, 0.5 + 2.0**-33]]
    assert noise.exponential(none, none)[0, :2].tolist() == pytest.approx([2.0**-33, 33 * math.log(2)])
    assert noise.gumbel(none, none)[0, :2].tolist() == pytest.approx([33 * math.log(2), -math.log(33 * math.log(2))])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.integers(0, 2**40))
def test_keys_by_arrays_agree_with_plain_ones(seed: int, sample: int, position: int) -> None:
    rows = noise.shared_rows([(seed, sample)] * noise.MANY, range(position, position + noise.MANY), "cpu")
    assert torch.equal(rows, noise.key_rows([noise.key(seed, sample, "text", position + i) for i in range(noise.MANY)], "cpu"))


def test_every_word_matters_and_no_rows_is_a_shape() -> None:
    words = [(s, i, n, p, a) for s in range(5) for i in range(3) for n in noise.STREAMS for p in range(7) for a in range(3)]
    assert len({noise.key(*w) for w in words}) == len(words)
    assert noise.key_rows([], "cpu").shape == (0, 2)
    with pytest.raises(KeyError):
        noise.key(1, 0, "txet", 0)


def test_nothing_waits_for_a_device_and_a_trace_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """On `meta` any look at a value raises; a traced graph holds no value of the run it was traced from."""
    monkeypatch.setattr(noise, "FEW", -1)                   # as on a device

    keys, others = (noise.shared_rows([(seed, 0)] * 3, [at, at + 1, at + 7], "cpu") for seed, at in ((0, 0), (17, 1_000_003)))
    words = keys, torch.arange(50, dtype=torch.int32)
    rows = noise.gumbel
    out = rows(*[w.to("meta") for w in words])
    assert out.shape == (3, 50) and out.dtype == torch.float32
    graph = make_fx(rows, tracing_mode="fake")(*words)
    assert torch.equal(graph(others, words[1]), rows(others, words[1]))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """One thread unless a test asks for more: quick on a busy machine too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("function", [noise.bits, noise.uniform, noise.exponential, noise.gumbel])
def test_a_tokens_value_does_not_depend_on_its_place(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Nor on how many there are: all of them are torch's, a few numpy's."""
    keys = noise.key_rows([noise.key(1, 0, "text", p) for p in range(3)], "cpu")
    tokens = torch.arange(100_003)
    assert 3 * 31 <= noise.FEW < 3 * len(tokens)
    torch.set_num_threads(2)
    whole = function(keys, tokens)
    torch.set_num_threads(1)
    assert torch.equal(function(keys, tokens), whole)
    for start in range(0, 100_000, 4_999):
        for width in (1, 2, 3, 5, 7, 13, 31):
            some = slice(start, start + width)
            assert torch.equal(function(keys, tokens[some]), whole[:, some])
            assert torch.equal(function(keys[1:2], tokens[some]), whole[1:2, some])
    shuffled = torch.stack([torch.randperm(len(tokens), generator=torch.Generator().manual_seed(i)) for i in range(3)])
    assert torch.equal(function(keys, shuffled), whole.gather(1, shuffled))
    assert torch.equal(function(keys[[2, 0]], tokens.int()), whole[[2, 0]])


def test_rounded_double_kernels_are_the_same_at_every_place() -> None:
    """What the noise and the distribution rest on, for arguments that no hash gives."""
    u = torch.rand(100_003, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for kernel in (lambda a: torch.log1p(-a), torch.log, torch.exp):
        whole = kernel(u).float()
        for start in range(0, 100_000, 1_999):
            for width in (1, 2, 3, 5, 7, 13):
                assert torch.equal(kernel(u[start:start + width].clone()).float(), whole[start:start + width])


# Statistics. A hash maps words (seed, sample, stream, position, attempt), one row each, and tokens to unsigned h [R, K].

Words = tuple[int, int, str, int, int]
Hash = Callable[[list[Words], Tensor], Tensor]


def ours(rows: list[Words], tokens: Tensor) -> Tensor:
    return unsigned(noise.bits(noise.key_rows([noise.key(*w) for w in rows], "cpu"), tokens))


def arithmetic(rows: list[Words], tokens: Tensor) -> Tensor:
    """Ours with shifts that copy the sign."""
    keys = noise.key_rows([noise.key(*w) for w in rows], "cpu")
    x = tokens.int() ^ keys[:, :1]
    for extra in (keys[:, 1:], 0):
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * (0x846CA68B - 2**32)
        x = (x ^ (x >> 16)) + extra
    return unsigned(x)


def linear(rows: list[Words], tokens: Tensor) -> Tensor:
    """A good mixer behind a key that is linear in everything."""
    base = [s * 1_000_003 + p * 7_919 + i * 104_729 + a * 15_485_863 + noise.STREAMS[n] * 32_452_843 for s, i, n, p, a in rows]
    x = (tokens.long() * 2_654_435_761 + torch.tensor(base)[:, None]) & 0xFFFFFFFF
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * multiplier) & 0xFFFFFFFF
    return x ^ (x >> 16)


TOKENS = torch.arange(16_384)
POSITIONS: list[Words] = [(7, 0, "text", 1000 + p, 0) for p in range(64)]


def chi2(cells: Tensor, count: int) -> float:
    n = torch.bincount(cells.flatten(), minlength=count).double()
    expected = n.sum() / count
    return float(stats.chi2.sf(float(((n - expected) ** 2 / expected).sum()), count - 1))


def pairs(a: Tensor, b: Tensor, shift: int = 27) -> float:
    """Two-dimensional chi-square over 32 × 32 cells, of five bits of each."""
    return chi2(((a >> shift) & 31) * 32 + ((b >> shift) & 31), 1024)


def uniformity(f: Hash) -> dict[str, float]:
    """Kolmogorov–Smirnov per row, and of the rows' p-values."""
    p = [float(stats.kstest(row.double().numpy() / 2**32, "uniform").pvalue) for row in f(POSITIONS, TOKENS)]
    return {"ks of p": float(stats.kstest(p, "uniform").pvalue)} | {f"ks row {i}": v for i, v in enumerate(p)}


def neighbours(f: Hash) -> dict[str, float]:
    h = f(POSITIONS, TOKENS)
    found = {f"tokens {d} apart": pairs(h[:, :-d], h[:, d:]) for d in (1, 2, 3, 64)}
    found["low bits, tokens 1 apart"] = pairs(h[:, :-1], h[:, 1:], 0)
    found |= {f"positions {d} apart": pairs(h[:-d], h[d:]) for d in (1, 2, 5)}
    changed: dict[str, Callable[[Words], Words]] = {
        "seed + 1": lambda w: (w[0] + 1, *w[1:]), "sample + 1": lambda w: (w[0], w[1] + 1, *w[2:]),
        "attempt + 1": lambda w: (*w[:4], w[4] + 1),
        "seed + 1, position − 1": lambda w: (w[0] + 1, *w[1:3], w[3] - 1, w[4]), "seed + 2**32": lambda w: (w[0] + 2**32, *w[1:]),
        "position + 1, attempt − 1": lambda w: (*w[:3], w[3] + 1, w[4] - 1),
        **{f"stream {n}": lambda w, n=n: (*w[:2], n, *w[3:]) for n in ("draft", "coin", "residual")}}  # type: ignore[misc]
    return found | {name: pairs(h, f([change(w) for w in POSITIONS], TOKENS)) for name, change in changed.items()}


def correlations(f: Hash) -> dict[str, float]:
    """A row against the next 199, and against itself moved by up to 199 tokens; the largest of each, as a p-value of all."""
    h = f([(7, 0, "text", p, 0) for p in range(200)], TOKENS).double()
    h = (h - h.mean(1, keepdim=True)) / h.std(1, keepdim=True)
    n = len(TOKENS)
    rows = (h[1:] @ h[0]).abs().max() / n**0.5
    lags = torch.tensor([float((h[0, d:] * h[0, :-d]).sum()) / (n - d) ** 0.5 for d in range(1, 200)]).abs().max()
    return {name: 1 - (1 - 2 * float(stats.norm.sf(float(z)))) ** 199 for name, z in (("rows", rows), ("lags", lags))}


def repetition(f: Hash) -> dict[str, float]:
    """Does the row of a nearby seed and position hold row 0 under a shift of the tokens? Chance of a false hit: 164,000 / 2**60."""
    base = f([(50, 0, "text", 4096, 0)], torch.arange(131_072))[0].sort().values
    rows: list[Words] = [(50 + s, 0, "text", 4096 + p, 0) for s in range(40) for p in range(-2048, 2049) if s or p]
    h = f(rows, torch.tensor([60_000, 60_001, 60_007, 60_100]))
    known = base[torch.searchsorted(base, h).clamp_(max=len(base) - 1)] == h
    return {"repetition": 0.0 if bool(known.all(1).any()) else 1.0}


def winners(f: Hash) -> dict[str, float]:
    """Over a flat vocabulary every token wins equally often, and the next winner does not depend on this one."""
    w = torch.cat([f([(s, 0, "text", p, 0) for p in range(1000)], TOKENS[:4096]).argmin(1) for s in range(4)]) >> 7
    return {"flat winner": chi2(w, 32), "next winner": chi2((w[:-1] >> 2) * 8 + (w[1:] >> 2), 64)}


def sampled_law(f: Hash) -> dict[str, float]:
    """Five tokens with known odds, ids spread over the vocabulary: their counts, and the counts of successive pairs."""
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
    h = f([(11, 0, "text", i, 0) for i in range(20_000)], torch.tensor([3, 31_337, 64_000, 100_001, 128_255]))
    chosen = (p.log() - torch.log(-torch.log1p(-(h.double() + 0.5) / 2**32))).argmax(1)

    def fit(cells: Tensor, law: Tensor) -> float:
        n = torch.bincount(cells, minlength=len(law)).double()
        return float(stats.chi2.sf(float(((n - law * len(cells)) ** 2 / (law * len(cells))).sum()), len(law) - 1))

    return {"law": fit(chosen, p), "successive": fit(chosen[:-1] * 5 + chosen[1:], torch.outer(p, p).flatten())}


BATTERY = (uniformity, neighbours, correlations, repetition, winners, sampled_law)


def alarms(f: Hash) -> set[str]:
    found = {name: p for check in BATTERY for name, p in check(f).items()}
    return {name for name, p in found.items() if p < 1e-6 / len(found)}


def test_the_noise_passes_the_battery() -> None:
    assert alarms(ours) == set()


def test_arithmetic_shifts_fail_the_battery() -> None:
    assert {"ks row 0", "tokens 1 apart", "attempt + 1", "law"} <= alarms(arithmetic)


def test_a_linear_key_fails_the_battery() -> None:
    assert "repetition" in alarms(linear)


def test_rows_of_a_text_by_arrays_are_those_key_by_key() -> None:
    owners = [(seed, sample) for seed in (0, 1, 2**63 - 1) for sample in range(20)]
    positions = [7 * at * at for at in range(len(owners))]
    rows = noise.key_rows([noise.key(*owner, "text", at) for owner, at in zip(owners, positions, strict=True)], "cpu")
    for count in (0, 1, noise.MANY - 1, noise.MANY, len(owners)):
        assert torch.equal(noise.shared_rows(owners[:count], positions[:count], "cpu"), rows[:count])


def test_a_single_value_is_the_tensors_but_for_its_rounding() -> None:
    tokens = torch.tensor([0, 1, 77, 4095, 128255])
    for seed in (0, 1, 2**63 - 1):
        for at in range(50):
            row = noise.key(seed, 0, "text", at)
            signed = noise.key_rows([row], "cpu").tolist()[0]            # as a drafter sees it
            expected = noise.gumbel(noise.key_rows([row], "cpu"), tokens)[0].tolist()
            for words in (row, signed):
                assert [noise.gumbel_of(words, token) for token in tokens.tolist()] == pytest.approx(expected, rel=1e-6, abs=1e-6)

"""Eight-bit weights: sums are the integers they claim to be, rows keep their bits, and speculation changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftproof import Engine, LoadConfig, Sampling
from draftproof.errors import LoadError, OptionError
from draftproof.models.int8 import HIGH, LOW, Int8Linear, can_round, rounded, split
from draftproof.models.load import load_target
from draftproof.models.packed import PackedLinear

pytestmark = pytest.mark.skipif(not can_round()[0], reason="no FBGEMM here")
Pair = tuple[Path, Path]


def layer(outputs: int = 96, inputs: int = 200, bias: bool = True, seed: int = 0) -> tuple[Int8Linear, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(seed)
    weight, b = torch.randn(outputs, inputs) * torch.rand(outputs, 1), torch.randn(outputs) if bias else None
    return Int8Linear(weight, b), weight, b


def hard_rows(count: int, inputs: int = 200) -> torch.Tensor:
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))
    x[1::4] *= 1e-6
    x[2::4, 7] = 300.0                                 # one input far above the others
    x[3::4] = 0.0
    return x


@pytest.mark.parametrize("inputs", [2, 63, 64, 200, 4096])
def test_sums_are_integers_taken_exactly(inputs: int) -> None:
    """FBGEMM's products against integer arithmetic, at the largest magnitudes too."""
    made, weight, _ = layer(inputs=inputs, bias=False)
    whole, scale = rounded(weight)
    x = torch.cat((hard_rows(9, inputs) if inputs > 7 else torch.randn(9, inputs), torch.tensor([[2.0], [-2.0]]).expand(2, inputs)))
    high, low, peak = split(x)
    assert high.abs().max() <= HIGH and low.abs().max() <= HIGH
    sums = [(part.long() @ whole.long().T).float() * scale for part in (high, low)]
    assert torch.equal(made(x), torch.add(sums[0], sums[1], alpha=1 / LOW) * (peak / HIGH))


def test_what_is_lost_is_the_weights_precision() -> None:
    made, weight, bias = layer(512, 1024)
    x = hard_rows(32, 1024)
    whole, scale = rounded(weight)
    near = (x.double() @ (whole.double() * scale[:, None].double()).T) + bias.double()
    assert ((weight - whole * scale[:, None]).abs() <= scale[:, None] * 0.5001).all()
    allowed = x.abs().amax(1, keepdim=True) / (2 * HIGH * LOW) * (weight.abs().sum(1) + scale * 512)
    assert ((made(x).double() - near).abs() <= allowed.double() + 1e-4).all()


def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    made, _, _ = layer(384, 384)
    x = hard_rows(70, 384)
    x[5, 3] = 1e30                                     # a neighbour that any shared scale would follow
    alone = torch.cat([made(row[None]) for row in x])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for start, stop in ((0, 2), (0, 5), (3, 20), (0, 70)):
            assert torch.equal(made(x[start:stop]), alone[start:stop])
            assert torch.equal(made(x[None, start:stop])[0], alone[start:stop])
    torch.set_num_threads(1)


def test_numbers_that_are_none_stay_none() -> None:
    made, _, _ = layer()
    x = torch.ones(3, 200)
    x[1, 4], x[2, 4] = torch.nan, torch.inf
    out = made(x)
    assert out[0].isfinite().all() and out[1].isnan().all() and not out[2].isfinite().any()


def test_other_types_come_back_as_they_were() -> None:
    made, _, _ = layer()
    x = torch.randn(3, 200).bfloat16()
    assert made(x).dtype == torch.bfloat16 and torch.equal(made(x), made(x.float()).bfloat16())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rounded_target_is_a_target(tiny_pair: Pair, temperature: float) -> None:
    load = LoadConfig(quantization="int8", dtype="float32")
    target = load_target(tiny_pair[0], load)
    assert target.facts.invisible and target.facts.reasons["linear layers"].startswith("int8: ")
    full = load_target(tiny_pair[0], LoadConfig(dtype="float32", self_test=False))
    assert target.facts.weight_bytes < 0.6 * full.facts.weight_bytes
    sampling = Sampling(temperature=temperature, max_tokens=40, seed=3, ignore_eos=True)
    texts = []
    for spec in ("none", "ngram", f"model:{tiny_pair[1]}"):
        with Engine(target, spec, load=load) as engine:
            texts.append(engine.generate([5, 9, 5, 9, 5], sampling).token_ids)
    assert texts[0] == texts[1] == texts[2]


def test_draft_models_are_rounded_too_and_heads_are_not(tiny_pair: Pair) -> None:
    target = load_target(tiny_pair[0], LoadConfig(quantization="int8", self_test=False))
    forms = {type(module) for layer in target.parts.layers for module in layer.modules()} & {Int8Linear, PackedLinear, torch.nn.Linear}
    assert forms == {Int8Linear} and isinstance(target.parts.output, Int8Linear)


def test_what_cannot_be_rounded_is_refused(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="quantization='int3': expected int8"):
        LoadConfig(quantization="int3")
    with pytest.raises(OptionError, match="rounded weights cannot be trained"):
        LoadConfig(quantization="int8", packed=False)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    with pytest.raises(LoadError, match="has no FBGEMM"):
        load_target(tiny_pair[0], LoadConfig(quantization="int8"))

"""Which levels of a checkpoint stay what they are, and in which form of linear layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof import LoadConfig, native
from draftproof.models.float8 import StreamedFloat8Linear
from draftproof.models.forms import beside_levels, keeps
from draftproof.models.fours import StreamedFoursLinear
from draftproof.models.int4 import Int4Linear, StreamedInt4Linear
from draftproof.models.int8 import Int8Linear, StreamedInt8Linear
from draftproof.models.levels import Levels, LevelWeight
from draftproof.models.packed import HeldLinear

CPU = torch.device("cpu")
OUT, IN = 16, 128


def levels(bits: int, group: int, zero: float | None) -> Levels:
    table = torch.ones(OUT, IN // group)

    def read() -> Tensor:
        return torch.zeros(OUT, IN, dtype=torch.float8_e4m3fn if bits == 8 and zero is None else torch.uint8)

    return Levels(bits, IN, table, None if zero is None else table * zero, read)


KINDS = {
    "four bits": (levels(4, 64, 8.0), (StreamedInt4Linear, Int4Linear)),
    "four bits in small groups": (levels(4, 32, 8.0), StreamedFoursLinear),
    "E2M1": (levels(4, 64, None), StreamedFoursLinear),
    "eight bits": (levels(8, IN, 128.0), (StreamedInt8Linear, Int8Linear)),
    "E4M3": (levels(8, IN, None), StreamedFloat8Linear),
    "eight bits, zero not in the middle": (levels(8, IN, 127.0), None),
    "eight bits in groups": (levels(8, 64, 128.0), None),
    "E4M3 in small groups": (levels(8, 64, None), None),
}
STREAMED = {"four bits in small groups", "E2M1", "E4M3"}      # which our kernels alone multiply


@pytest.mark.parametrize("quantization,expected", [
    (None, {"four bits", "four bits in small groups", "E2M1", "eight bits", "E4M3"}),
    ("int4", {"four bits", "four bits in small groups"}),
    ("int8", {"eight bits"}),
])
def test_which_levels_stay(quantization: str | None, expected: set[str]) -> None:
    if not native.available()[0] or not native.takes_narrow(native.EIGHT_FLOATS):
        expected = expected - STREAMED
    for dtype in native.TYPES:
        kept = keeps(LoadConfig(quantization=quantization), dtype, CPU)
        assert {name for name, (found, _) in KINDS.items() if kept(found)} == expected
    for config, dtype in ((LoadConfig(packed=False), torch.float32), (LoadConfig(quantization=quantization), torch.float16)):
        assert not any(keeps(config, dtype, CPU)(found) for found, _ in KINDS.values())


@pytest.mark.parametrize("name", [name for name, (_, form) in KINDS.items() if form])
def test_in_which_form(name: str) -> None:
    found, form = KINDS[name]
    if not keeps(LoadConfig(), torch.float32, CPU)(found):
        pytest.skip("no kernel for them here")
    assert isinstance(beside_levels(None, CPU)(LevelWeight([found], torch.bfloat16, CPU), None), form)      # type: ignore[arg-type]
    assert type(beside_levels(None, CPU)(torch.zeros(OUT, IN), None)) is HeldLinear

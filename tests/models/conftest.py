"""The kernels in the forms that this processor does not take by itself, and a GPU's way through a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftproof import compiler, native
from draftproof.bench.machine import machine
from draftproof.models import attention, fused, load, paged
from draftproof.models.tiled import TiledLinear


@pytest.fixture(scope="module", params=["other width", "as on ARM", "pairs", "no pairs"])
def other_kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels with vectors of a width that this processor does not take, as ARM's processors take them, and with and without its
    products of bfloat16 pairs, which one with tiles does not take."""
    if not native.available()[0]:
        pytest.skip(native.available()[1])
    if "pairs" in request.param and not machine()["cpu_flags"].get("avx512_bf16"):
        pytest.skip("this processor has no bfloat16 instructions")
    stock = native.loaded().wide() // 2
    lanes = {"other width": 16 if stock == 8 else 8, "as on ARM": 4}.get(request.param, stock)
    with pytest.MonkeyPatch.context() as patch:
        asked = {"as on ARM": ["-DREGISTERS=32", "-DTAKES_DOTS=1"], "pairs": ["-DTAKES_PAIRS=1"], "no pairs": ["-DTAKES_PAIRS=0"]}
        if request.param != "pairs" or " avx512_fp16" in Path("/proc/cpuinfo").read_text():     # without it these are the stock kernels
            # What one process of this run has compiled others find: it takes a while where vectors are made of halves.
            mine = tmp_path_factory.getbasetemp()
            patch.setenv("XDG_CACHE_HOME", str(mine.parent if mine.name.startswith("popen-") else mine))
            # -O1: a third of the compiler's time, and the same arithmetic
            patch.setattr(compiler, "FLAGS",
                          [*compiler.FLAGS, "-O1", f"-DLANES={lanes}", *asked.get(request.param, []), "-DTAKES_TILES=0"])
        native._library.cache_clear()
        assert native.available()[0] and native.loaded().wide() == 2 * lanes
        yield
    native._library.cache_clear()


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads take the linear layers, norms and attention of a GPU, on the CPU."""
    for module in (attention, fused, paged):
        monkeypatch.setattr(module, "compiled", lambda *_: False)
    monkeypatch.setattr(attention, "flash_page", attention.plain_page)
    monkeypatch.setattr(load, "form_of", lambda *_: TiledLinear)

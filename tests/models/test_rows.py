"""Blocks by our kernels for a GPU, in Triton's interpreter, against the fused block of torch's operations, recorded and not. What Triton's
compiler makes of the kernels, and bits, are tested where there is a GPU, by the load itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from elsewhere import NAME, WAITS, elsewhere
from test_fused import OPTIONS, save
from test_graphs import recorded

from draftproof import gpu
from draftproof.config import LoadConfig
from draftproof.errors import LoadError
from draftproof.models import rows
from draftproof.models.float8 import Float8Linear
from draftproof.models.graphs import GraphedPass
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.passes import Pass
from draftproof.models.passes import Path as RowPath
from draftproof.types import Draft, Scores

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles here, and interprets nothing", allow_module_level=True)

from draftproof.gpu import calls  # noqa: E402

USABLE = rows.usable
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid)")     # rows that fill a recording up hold what nobody reads


@pytest.fixture(autouse=True)
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads take our kernels for a GPU, in blocks as large as an interpreter likes them."""
    monkeypatch.setattr(calls, "blocks", lambda *_: calls.Blocks(16, 128, 64, 2, 4))
    monkeypatch.setattr(rows, "usable", lambda *_: True)


def loaded(folder: Path, **more: object) -> PagedTarget:
    config = LoadConfig(dtype="float32", device="cpu", page_tokens=64, self_test=False, **more)  # type: ignore[arg-type]
    target = load_target(folder, config)
    assert isinstance(target, PagedTarget)
    return target


def play(target: PagedTarget) -> list[Scores]:
    """A prefill, a chain, a tree, and a batch of two."""
    text = torch.arange(20) * 37 % 199 + 1
    target.set_taps([0, 2])
    slot, other = target.open(text.tolist(), room=40), target.open([1, 2], room=40)
    found = [target.extend([slot, other], [text[:5], text[:1]]), target.score([slot], text[:1], [Draft.chain([5, 6])])]
    target.rewind(slot, (0,))
    found.append(target.score([slot, other], text[:2], [Draft(torch.tensor([9, 8, 7]), (-1, -1, 1)), Draft.empty()]))
    for each in (slot, other):
        target.rewind(each, ())
        target.close(each)
    target.check()
    return found


def close(ours: list[Scores], theirs: list[Scores]) -> bool:
    pairs = [(one.logits, other.logits) for one, other in zip(ours, theirs, strict=True)]
    pairs += [(one.taps[i], other.taps[i]) for one, other in zip(ours, theirs, strict=True) for i in (0, 2)]
    return all(a.dtype == b.dtype and float((a - b).abs().max()) <= 2e-5 * float(b.abs().max()) for a, b in pairs)


def test_our_kernels_agree_with_torch_recorded_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("qwen3", tmp_path)
    ours = loaded(tmp_path)
    assert all(type(layer) is rows.RowsLayer for layer in ours.parts.layers)
    assert ours.fused is not None and ours.fused.rows_alone() and not ours.whole_tiles
    found = play(ours)
    monkeypatch.setattr(rows, "check", lambda *_: None)      # done once
    with recorded() as recorder:
        target = loaded(tmp_path)
    assert type(target.fused) is GraphedPass
    assert close(play(target), found) and recorder.replays >= 2
    monkeypatch.setattr(rows, "usable", lambda *_: False)
    assert close(found, play(loaded(tmp_path)))


def test_heads_are_one_kernel_where_every_row_writes_its_own_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What two kernels make, which make it of trees, whose keys may lie in several places. Recorded, where rows are filled up, and not."""
    monkeypatch.setitem(OPTIONS, "wide", ("llama", {"head_dim": 32}))
    monkeypatch.setattr(rows, "check", lambda *_: None)
    save("wide", tmp_path)
    taken: list[str] = []

    def counting(name: str) -> None:
        right = getattr(calls, name)
        monkeypatch.setattr(calls, name, lambda x, *more: taken.append(f"{name} {len(x)}") or right(x, *more))

    counting("heads")
    counting("turn")
    with recorded():
        found = play(loaded(tmp_path))
    assert list(dict.fromkeys(taken)) == ["heads 8", "heads 4", "turn 8"], "six rows, three, and five of a tree and a text"
    monkeypatch.setattr(calls, "halves", lambda *_: 0)
    taken.clear()
    assert close(found, play(loaded(tmp_path))) and {one.split()[0] for one in taken} == {"turn"}


def test_many_rows_of_a_fast_load_are_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    monkeypatch.setattr(rows, "FEW", 3)
    monkeypatch.setattr(rows, "check", lambda *_: None)
    target, twin = loaded(tmp_path, reproducible=False), loaded(tmp_path)
    text = torch.arange(rows.FEW + 4) % 190
    found = [each.extend([each.open(text.tolist())], [text]).logits for each in (target, twin)]
    assert not target.fused.rows_alone() and float((found[0] - found[1]).abs().max()) <= 2e-5 * float(found[1].abs().max())  # type: ignore[union-attr]


def test_weights_of_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(*shape, generator=random) for shape in ((96, 160), (96,), (5, 160)))
    made = rows.linear_of_eight(True)(weight, bias)
    assert isinstance(made, rows.RowsFloat8Linear)
    wide = made.eight.float() * made.steps
    assert torch.equal(made.matrix(), Float8Linear(weight, bias).eight)
    near = {"plain": torch.nn.functional.linear(x, wide, bias), "onto": x[:, :96] + torch.nn.functional.linear(x, wide, bias)}
    for name, found in (("plain", made(x)), ("onto", made.onto(x[:, :96].clone(), x))):
        assert float((found - near[name]).abs().max()) <= 2e-3 * float(near[name].abs().max()), name
    assert isinstance(rows.linear_of_eight(True)(weight[:90], None), rows.RowsLinear)


def test_a_pass_that_is_not_recorded_is_planned_on_the_host(tmp_path: Path) -> None:
    save("llama", tmp_path)
    layer = loaded(tmp_path).parts.layers[0]
    assert isinstance(layer, rows.RowsLayer)
    with elsewhere(), torch.inference_mode():
        ids, at = torch.zeros(1, 3, dtype=torch.int64).to(NAME), [63, 64, 65]
        p = Pass(ids, at, at, torch.tensor([127, 128, 129]), None, [RowPath([1, 2], range(3))], 64, 1)
        WAITS.clear()
        p = layer.placed(p)
        assert not WAITS and {t.device.type for t in (p.positions, p.write_to, *p.plan[:2], *p.plan.tiles[:3])} == {NAME}
        assert p.plan.write_to.tolist() == [127, 128, 129] and p.plan.write_from.tolist() == [0, 1, 2]
        assert p.plan.tiles.table.tolist() == [[1, 2]] and p.plan.tiles.position.tolist() == at


def test_what_our_kernels_do_not_take_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "can_fuse", lambda model: (True, ""))
    monkeypatch.setattr(gpu, "available", lambda *_: (True, "ours, in Triton"))

    def asked(heads: int = 8, device: str = "cuda", **more: object) -> tuple[bool, str]:
        config, reasons = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=1), {}
        model = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16, config=config)
        return USABLE(model, LoadConfig(**more), reasons), reasons.get("kernels", "")  # type: ignore[arg-type]

    assert asked() == (True, "ours, in Triton")
    assert asked(page_tokens=96) == (False, "torch's: page_tokens=96 is no multiple of 64")
    assert asked(heads=40) == (False, "torch's: a key head has 40 query heads, more than 32")
    assert asked(device="cpu") == asked(packed=False) == asked(compile=True) == asked(kernels=False) == (False, "")


def test_a_kernel_that_does_not_compile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)

    def broken(*_: object) -> None:
        raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(calls, "attend", broken)
    with pytest.raises(LoadError, match=r"do not run here \(out of resource: shared memory\); expected .*no-kernels"):
        loaded(tmp_path)


def test_a_kernel_that_is_wrong_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama", tmp_path)
    right = calls.attend
    monkeypatch.setattr(calls, "attend", lambda *given: right(*given) / 2)
    with pytest.raises(LoadError, match=r"our kernels and torch's operations differ by .*expected at most .*no-kernels"):
        loaded(tmp_path)

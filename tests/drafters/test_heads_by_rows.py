"""Chains and trees of heads whose layers run through our kernels for a GPU, in Triton's interpreter and with a recorder that hands back
what it was given, against those of the lines of torch: the same drafts, and the same entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafters.test_recorded import SIZES, SOME, Recorder, V, as_on_a_device, both, text

from draftproof import gpu
from draftproof.drafters import recurrent
from draftproof.drafters.eagle import Eagle2Drafter
from draftproof.drafters.eagle3 import Eagle3Drafter
from draftproof.drafters.planted import PlantedTrees
from draftproof.errors import LoadError
from draftproof.models.fake import TableTarget
from draftproof.models.heads import rows
from draftproof.models.heads.blocks import join
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.rows import RowsLinear

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton compiles here, and interprets nothing", allow_module_level=True)

from draftproof.gpu import calls  # noqa: E402

__all__ = ["as_on_a_device"]
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid|All-NaN)")     # rows that fill a recording up hold what nobody reads
FEWER = {**SIZES, "heads": 2, "kv_heads": 1}
WIDE = {**FEWER, "head_dim": 32}


def eagle3(target: TableTarget) -> Eagle3Drafter:
    """Two layers; their products of q, k and v turn in one kernel."""
    return Eagle3Drafter(Eagle3Head.fresh(target.parts, SOME, hidden=32, layers=2, norm_before_residual=True, **WIDE), V)


def normed(target: TableTarget) -> Eagle3Drafter:
    """Queries and keys of each head are normed, and the output."""
    return Eagle3Drafter(Eagle3Head.fresh(target.parts, None, hidden=32, norms="fc_norm", norm_output=True, qk_norm=True, **SIZES), V)


def eagle2(target: TableTarget) -> Eagle2Drafter:
    return Eagle2Drafter(EagleHead.fresh(target.parts, **SIZES), V)


def deep(target: TableTarget) -> Eagle3Drafter:
    """Trees, two layers."""
    return Eagle3Drafter(Eagle3Head.fresh(target.parts, SOME, hidden=32, layers=2, **FEWER), V)


@pytest.mark.parametrize("build, nodes, heats", [(eagle3, 0, (0.8, 0.0)), (normed, 0, (0.0,)), (eagle2, 0, (0.8,)), (deep, 4, (0.8,))])
def test_drafts_by_our_kernels_are_those_of_torch(build: Any, nodes: int, heats: tuple[float, ...],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampled text and a greedy one of different lengths, or one alone; nearly every draft is rejected. nodes: of trees, beyond a
    chain's."""
    monkeypatch.setattr(calls, "blocks", lambda *_: calls.Blocks(16, 64, 64, 2, 4))
    target, recorder, made, taken = TableTarget(V, order=1, seed=1), Recorder(), [], set[str]()
    monkeypatch.setattr(recurrent, "recorder", lambda device: recorder)
    for able in (True, False):
        torch.manual_seed(3)
        monkeypatch.setattr(rows.gpu, "available", lambda *_, able=able: (able, ""))
        made.append(build(target))
        assert made[-1].recorded.ours is able
    for name in ("heads", "turn", "attend", "gate", "product"):
        right = getattr(calls, name)
        monkeypatch.setattr(calls, name, lambda *x, name=name, right=right, **more: taken.add(name) or right(*x, **more))
    budgets = (3, 3 + nodes), (2, 2 + nodes)
    assert both(target, made, lambda: [text(i, heat, 5 + 3 * i, 4) for i, heat in enumerate(heats)], lambda i, n: budgets[(n + i) % 2]) >= 2
    one, twin = made
    ours = [each for each in recorder.made if each.seats]
    assert ours and len(ours) < len(recorder.made) and not one.recorded.failed and not twin.recorded.failed
    assert {"attend", "product", "heads" if build is eagle3 else "turn"} <= taken
    trees = [each for each in ours if isinstance(each, PlantedTrees)]       # of the last rounds, which have room for less depth, too
    assert (len(trees) == len(ours)) == bool(nodes) and trees and all(each.sighted or each.bucket.depth == 1 for each in trees)
    assert type(one.head.layers[0].self_attn.qkv) is RowsLinear is not type(twin.head.layers[0].self_attn.qkv)


@pytest.mark.parametrize("wrong", ["norm", "attend", "product", "bits"])
def test_kernels_that_compute_something_else_are_told(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableTarget(V, order=1, seed=1)
    head = Eagle3Head.fresh(target.parts, SOME, hidden=32, **SIZES).requires_grad_(False)
    join(head)
    monkeypatch.setattr(rows.gpu, "available", lambda *_: (True, ""))
    if wrong == "bits":
        right = calls.attend
        monkeypatch.setattr(calls, "attend", lambda *given, sight=None: right(*given, sight=None if sight is None else sight * 0 + 3))
    else:
        kernel = getattr(calls, wrong)
        monkeypatch.setattr(calls, wrong, lambda *given, **more: kernel(*given, **more) * 1.2)
    with pytest.raises(LoadError, match=r"differ by .* of what a draft head computes; expected at most 5e-02: .*no-kernels"):
        rows.by_rows(head, torch.device("cpu"), torch.float32)


def test_kernels_may_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.gpu, "available", lambda *_: (True, ""))
    monkeypatch.setattr(recurrent, "recorder", lambda device: Recorder())
    target = TableTarget(V, order=1, seed=1)
    for graphs, kernels in ((True, True), (True, False), (False, True)):
        made = Eagle3Drafter(Eagle3Head.fresh(target.parts, SOME, hidden=32, **SIZES), V, graphs, kernels)
        assert (made.recorded is not None) == graphs and isinstance(made.head.fc, RowsLinear) == (graphs and kernels)  # type: ignore[attr-defined]
        assert made.recorded is None or made.recorded.ours == kernels


def test_heads_that_are_not_known_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TableTarget(V, order=1, seed=1)
    monkeypatch.setattr(gpu, "available", lambda *_: (True, ""))
    partial = Eagle3Head.fresh(target.parts, SOME, hidden=32, **SIZES)
    partial.rope.whole = False
    crowded = Eagle3Head.fresh(target.parts, SOME, hidden=32, **{**SIZES, "heads": 40, "kv_heads": 1})
    for head in (MtpHead.fresh(target.parts), partial, crowded):
        assert not rows.by_rows(head, torch.device("cuda"), torch.float32)
        assert not any(isinstance(part, RowsLinear) for part in head.modules())

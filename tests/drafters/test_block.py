"""Block drafters: what they are told, what they say, and that a head which has learnt one text by heart is accepted to its reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.block_heads import cut, dflash, dflash2, domino, dspark, xpress
from contract.table_rounds import SharedNoise, Text, opened, plain, rows_of, speculate
from torch import Tensor

from draftproof import Engine, LoadConfig, Sampling
from draftproof.core.probs import distribution
from draftproof.core.tree import path
from draftproof.drafters import dflash as dflash_module
from draftproof.drafters.base import Site
from draftproof.drafters.dflash import DFlashDrafter
from draftproof.drafters.dflash2 import DFlash2Drafter
from draftproof.drafters.dspark import DSparkDrafter
from draftproof.drafters.pard import PardDrafter, mask_token_of
from draftproof.errors import LoadError
from draftproof.models.causal import CausalLM
from draftproof.models.fake import TableTarget
from draftproof.models.heads.dflash import DFlash
from draftproof.models.heads.dflash2 import DFlash2
from draftproof.models.heads.domino import Domino
from draftproof.models.heads.dspark import DSpark
from draftproof.models.heads.files import read_files
from draftproof.models.heads.xpress import XPress
from draftproof.models.load import load_target
from draftproof.models.target import Target
from draftproof.train.base import Features, Task
from draftproof.train.dflash import DFlash2Task, DFlashTask, DSparkTask, anchors_of, cross_entropy, decay, total_variation
from draftproof.train.pard import PardTask
from draftproof.train.pard import rows_of as pard_rows
from draftproof.types import Budget, Commit, Signals

V = 13
WARM = Sampling(temperature=0.8, top_p=0.95, max_tokens=60)


def table(**more: Any) -> TableTarget:
    return TableTarget(V, order=2, seed=1, **more)


# What a drafter is told


def test_a_block_holds_so_many_guesses_and_says_so() -> None:
    target, text = table(), Text.of([1, 2, 3, 4], WARM)
    for drafter, reach in ((dflash(target), 5), (dflash2(target), 5), (dspark(target), 5), (xpress(target), 5), (domino(target), 5)):
        states, _ = opened(target, drafter, [text])
        draft, = drafter.propose(states, [Budget(9, 9, "", "")], SharedNoise())
        assert len(draft) == reach and draft.reason == f"a block holds {reach} guesses"
        draft, = drafter.propose(states, [Budget(3, 3, "", "")], SharedNoise())
        assert len(draft) == 3 and not draft.reason


def test_without_the_hidden_states_of_the_last_tokens_a_head_is_silent() -> None:
    target, text, budget = table(), Text.of([1, 2, 3, 4, 5, 6], WARM), Budget(3, 3, "", "")
    drafter = dflash(target)
    state = drafter.open(text, None)
    draft, = drafter.propose([state], [budget], SharedNoise())
    assert not len(draft) and "not here yet" in draft.reason
    rows = torch.stack([target.hidden(text.tokens[:n]) for n in range(1, 9)])
    taps = {layer: rows for layer in drafter.needs.taps}

    def told(start: int, stop: int) -> Signals:
        return Signals(start, {layer: hidden[start:stop] for layer, hidden in taps.items()})

    text.tokens.append(7)
    drafter.observe([state], [Commit(6, (7,), ("plain",), ())], [told(5, 6)])
    late, = drafter.propose([state], [budget], SharedNoise())
    assert len(late) == 3 and (state.window.first, state.window.end) == (5, 6), "it begins with the window it gets"
    text.tokens += [8, 9]
    drafter.observe([state], [Commit(8, (9,), ("plain",), ())], [told(7, 8)])
    assert (state.window.first, state.window.end) == (7, 8), "after a gap the window begins anew"
    whole = drafter.open(text, told(0, 8))
    drafter.observe([whole], [Commit(8, (9,), ("plain",), ())], [told(6, 8)])
    assert (whole.window.first, whole.window.end) == (0, 8), "what is known already is not taken twice"


def test_context_keys_do_not_depend_on_how_the_text_grew() -> None:
    target, drafter = table(), dflash(table())
    text = Text.of([1, 2, 3], WARM)
    states, _ = opened(target, drafter, [text])
    for token in (4, 5, 6, 7, 8):
        drafter.propose(states, [Budget(4, 4, "", "")], SharedNoise())       # a block on the way leaves nothing behind
        row, at = target.hidden(text.tokens)[None], len(text.tokens)
        text.tokens.append(token)
        drafter.observe(states, [Commit(at, (token,), ("plain",), ())], [Signals(at - 1, {i: row for i in drafter.needs.taps})])
    again, _ = opened(target, drafter, [text])
    drafts = [drafter.propose(each, [Budget(5, 12, "", "")], SharedNoise())[0] for each in (states, again)]
    assert states[0].window.end == 7 and drafts[0].tokens.tolist() == drafts[1].tokens.tolist() and drafts[0].parents == drafts[1].parents


def test_what_the_target_leaves_waits_until_a_guess_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that asks for nothing took as long as two plain passes of the built-in target, to project one hidden state."""
    target, text = table(), Text.of([1, 2, 3, 4], WARM)
    drafter, passes = dflash(target), list[int]()
    keys = DFlash.keys

    def counted(head: DFlash, fused: Tensor, positions: Tensor) -> Any:
        passes.append(len(positions))
        return keys(head, fused, positions)

    monkeypatch.setattr(DFlash, "keys", counted)
    monkeypatch.setattr(dflash_module, "CHUNK", 8)

    def told(start: int, stop: int) -> Signals:
        rows = torch.stack([target.hidden(text.tokens[:n]) for n in range(start + 1, stop + 1)])
        return Signals(start, {layer: rows for layer in drafter.needs.taps})

    state = drafter.open(text, told(0, 3))

    def write(count: int) -> None:
        for end in range(len(text.tokens), len(text.tokens) + count):
            text.tokens.append(end % V)
            drafter.observe([state], [Commit(end, (end % V,), ("plain",), ())], [told(end - 1, end)])

    write(3)
    assert not passes and state.window.end == 6
    draft, = drafter.propose([state], [Budget(3, 3, "", "")], SharedNoise())
    assert len(draft) == 3 and passes == [6]
    write(20)
    assert max(passes) <= 9 and state.window.ahead <= 8 and state.window.end == 26, "no more than a chunk waits"


def test_a_text_longer_than_the_context_ends_the_guesses_with_a_reason() -> None:
    target = table()
    text, expected = (Text.of([1, 2, 3], Sampling(temperature=1.0, top_p=1.0, max_tokens=61)) for _ in range(2))
    log = speculate(target, dflash(target, context=16), [text], lambda i, round_: (4, 4))
    assert text.tokens == plain(target, expected) and len(text.tokens) == 4 * 16
    assert any(draft.reason == "the drafter's context ends at 16" for draft in log.drafts) and not len(log.drafts[-2])


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "xpress", "domino"])
def test_a_folder_is_served_by_its_name_and_refused_by_another(kind: str, tiny: Target, tmp_path: Path) -> None:
    make = {"dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark, "xpress": XPress, "domino": Domino}[kind]
    make.fresh(tiny.parts, layers=1, context=32, mask_token=3).save(tmp_path)
    expected = {}
    for drafter in (f"{kind}:{tmp_path}", "none"):
        with Engine(tiny, drafter, 4 if drafter != "none" else "auto", tree=9 if drafter != "none" else None) as engine:
            out = engine.generate(PROMPT, Sampling(temperature=0.7, seed=2, max_tokens=40, ignore_eos=True))
            assert engine.speculation.state[0] in ("on", "none"), engine.speculation.failure
        expected[drafter] = out.token_ids
        assert drafter == "none" or out.metrics["drafted"] > 20
    assert len(set(expected.values())) == 1
    with pytest.raises(LoadError, match=f"head for drafter {kind}"):
        Engine(tiny, f"{'dspark' if kind == 'dflash' else 'dflash'}:{tmp_path}", 4)


# What it says


def logits_along(drafter: Any, state: Any, drafted: list[int]) -> list[Tensor]:
    """Logits of the places behind `drafted[:0], drafted[:1], …`, one pass, from the head itself."""
    if isinstance(drafter, PardDrafter):
        lm = drafter.lm
        slot = lm.open(state.seq.tokens)
        fed = torch.tensor(list(state.seq.tokens) + [drafter.mask_token] * len(drafted))
        found = [lm.extend([slot], [fed[:len(state.seq.tokens)]]).logits[0]]
        found += [lm.extend([slot], [fed[i:i + 1]]).logits[0] for i in range(len(state.seq.tokens), len(fed))]
        lm.close(slot)
        return found[:len(drafted)]
    with torch.inference_mode():
        slots = drafter._pass([state], len(drafted))
        found, zero, before = [], torch.tensor([0]), None
        for level, token in enumerate(drafted):
            found.append(slots.logits(level, zero, zero, before)[0])
            before = torch.tensor([token])
    return found


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "vanilla", "gated", "rnn", "xpress", "domino", "pard"])
@pytest.mark.parametrize("nodes", [4, 9])
def test_the_law_is_what_the_draft_was_drawn_from(kind: str, nodes: int) -> None:
    target = table()
    made: dict[str, Any] = {"dflash": lambda: dflash(target), "dflash2": lambda: dflash2(target),
                            "xpress": lambda: xpress(target), "domino": lambda: domino(target),
                            "pard": lambda: PardDrafter(TableTarget(V, order=3, seed=5), 2)}
    drafter = made.get(kind, lambda: dspark(target, kind=kind))()
    texts = [Text.of([i, 2, 3], Sampling(temperature=0.8, top_k=9, repetition_penalty=1.2), seed=i, id=str(i)) for i in range(4)]
    states, _ = opened(target, drafter, texts)
    drafts = drafter.propose(states, [Budget(4, nodes, "", "")] * 4, SharedNoise(keep_law=True))
    for text, state, draft in zip(texts, states, drafts, strict=True):
        spine = [path(draft.parents, node) for node in range(len(draft))]
        longest = [draft.tokens[i].item() for i in max(spine, key=len)]
        logits = logits_along(drafter, state, longest)
        assert draft.law is not None
        widths = [draft.parents.count(parent) for parent in dict.fromkeys(draft.parents)]
        assert widths == ([1, 1, 1, 1] if nodes == 4 else [3, 2, 2, 2]), "siblings are fixed before the draw, and even"
        for node, row in enumerate(draft.law.row):
            above = [draft.tokens[i].item() for i in spine[node]][:-1]
            expected = distribution(logits[len(above)][None], [rows_of(text, [above])])[0]
            assert torch.allclose(draft.law.logq[row].double(), expected.double(), atol=1e-5)


def test_laws_of_a_reduced_vocabulary_beside_options_that_name_ids() -> None:
    """The sequence with penalties makes its levels as wide as the target's, and ends first."""
    target, drafter = table(), cut(table())
    texts = [Text.of([1, 2, 3], Sampling(temperature=1.0, top_p=1.0, repetition_penalty=1.3)),
             Text.of([4, 5, 6], Sampling(temperature=1.0, top_p=1.0))]
    states, _ = opened(target, drafter, texts)
    for first in (2, 4):
        drafts = drafter.propose(states, [Budget(first, first, "", ""), Budget(4, 4, "", "")], SharedNoise(keep_law=True))
        for text, draft, state in zip(texts, drafts, states, strict=True):
            assert draft.law is not None
            narrow = torch.full((len(draft), V), -torch.inf)
            narrow[:, drafter.head.ids] = torch.stack(logits_along(drafter, state, draft.tokens.tolist()))  # type: ignore[index]
            law, ids = draft.law.logq, draft.law.ids
            law = law if ids is None else torch.full_like(narrow, -torch.inf).index_copy(1, ids, law)
            expected = distribution(narrow, [rows_of(text, [draft.tokens.tolist()[:i] for i in range(len(draft))])])
            assert torch.allclose(law.exp(), expected.exp(), atol=1e-5)


def test_the_score_of_a_dspark_chain_is_its_confidence_and_of_a_dflash_chain_its_margin() -> None:
    target, text = table(), Text.of([1, 2, 3, 4], WARM)
    drafter = dspark(target)
    states, _ = opened(target, drafter, [text])
    draft, = drafter.propose(states, [Budget(3, 3, "", "")], SharedNoise())
    with torch.inference_mode():
        hidden = drafter._pass(states, 3).slots  # type: ignore[attr-defined]
        before = torch.tensor([4, *draft.tokens.tolist()[:-1]])
        expected = drafter.head.confidence(hidden[0], before)  # type: ignore[operator]
    assert draft.score is not None and torch.allclose(draft.score, expected, atol=1e-5)
    plain_head = dflash(target)
    draft, = plain_head.propose(opened(target, plain_head, [text])[0], [Budget(3, 3, "", "")], SharedNoise())
    assert draft.score is not None and bool((draft.score > 0).all())


def test_a_tied_tree_scores_every_node_behind_its_own_parent() -> None:
    """Children of two siblings are ranked by different laws; with independent slots by the same one."""
    target, text = table(), Text.of([1, 2, 3, 4], Sampling(temperature=1.0, top_p=1.0), seed=2)
    same = {}
    for drafter in (dflash(target), dflash2(target), dspark(target), xpress(target), domino(target)):
        states, _ = opened(target, drafter, [text])
        draft, = drafter.propose(states, [Budget(2, 40, "", "")], SharedNoise())
        ids = draft.tokens.tolist()
        below = {node: [ids[i] for i, parent in enumerate(draft.parents) if parent == node] for node in range(len(ids))}
        several = [children for children in below.values() if len(children) > 1]
        same[drafter.name] = all(a[0] == b[0] for a, b in zip(several, several[1:], strict=False))
        assert len(several) > 2
    assert same.pop("dflash") and not any(same.values()), same


# pard


class Counting(TableTarget):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.passes: list[list[int]] = []

    def extend(self, slots: Any, tokens: Any) -> Any:
        self.passes.append([int(t.shape[0]) for t in tokens])
        return super().extend(slots, tokens)

    def score(self, slots: Any, roots: Any, drafts: Any) -> Any:
        self.passes.append([len(d) + 1 for d in drafts])
        return super().score(slots, roots, drafts)


def test_pard_takes_one_pass_per_round_and_its_slot_holds_only_text() -> None:
    lm = Counting(V, order=1, seed=9)
    drafter = PardDrafter(lm, 0, prefill_chunk=4)
    texts = [Text.of(range(10), WARM), Text.of([1, 2], WARM)]
    states = [drafter.open(text, None) for text in texts]
    budgets = [Budget(4, 4, "", ""), Budget(2, 8, "", "")]
    first = drafter.propose(states, budgets, SharedNoise())
    assert lm.passes == [[4], [4], [2 + 3, 2 + 1]], "the prompt in chunks, then both texts and their masks at once"
    assert all(state.slot.tokens == text.tokens for state, text in zip(states, texts, strict=True))  # type: ignore[union-attr]
    lm.passes.clear()
    again = drafter.propose(states, budgets, SharedNoise())
    assert [d.tokens.tolist() for d in again] == [d.tokens.tolist() for d in first] and lm.passes == [[1 + 3, 1 + 1]]
    texts[0].tokens += [5, 6, 7]
    drafter.observe(states[:1], [Commit(10, (5, 6, 7), ("accepted",) * 3, (0, 1, 2))], [None])
    lm.passes.clear()
    drafter.propose(states[:1], [Budget(3, 3, "", "")], SharedNoise())
    assert lm.passes == [[3 + 2]] and states[0].slot.tokens == texts[0].tokens  # type: ignore[union-attr]
    drafter.close(states[0])
    drafter.close(states[1])
    assert not lm.open_slots


def test_a_model_without_a_mask_token_is_no_pard(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = (load_target(folder, LoadConfig(self_test=False)) for folder in tiny_pair)
    with pytest.raises(LoadError, match="pard_token is None"):
        mask_token_of(draft)
    for fields, wanted in (({"pard_token": 7}, 7), ({"mask_token_id": 9}, 9), ({"pard_token": 5, "mask_token_id": 9}, 5)):
        draft.parts.config.update({"pard_token": None, "mask_token_id": None, **fields})
        assert mask_token_of(draft) == wanted
    draft.parts.config.update({"pard_token": 4000})
    with pytest.raises(LoadError, match="pard_token is 4000"):
        mask_token_of(draft)
    draft.parts.config.update({"pard_token": 7, "target_layers": [-1]})
    with pytest.raises(LoadError, match="PARD-2"):
        mask_token_of(draft)
    CausalLM.read(tiny_pair[1]).save(tmp_path / "pard", pard_token=7, spd_type="pard")
    made = PardDrafter.from_spec(str(tmp_path / "pard"), {}, Site(target, "match", LoadConfig(self_test=False)))
    assert made.mask_token == 7 and made.checks and all(check.ok for check in made.checks if check.fatal)


# Losses, against plain loops


def test_the_weights_of_a_block_against_plain_loops() -> None:
    assert torch.allclose(decay(3, 4.0), torch.tensor([1.0, 0.7788, 0.6065]), atol=1e-4)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    assert float(cross_entropy(q.log(), p.log())) == pytest.approx(0.5 * 1.6094 + 0.3 * 1.6094 + 0.2 * 0.5108, abs=1e-3)
    assert float(total_variation(q.log(), p.log())) == pytest.approx(0.4) and float(total_variation(p.log(), p.log())) == pytest.approx(0.0)


def test_anchors_stand_before_tokens_that_count() -> None:
    mask = torch.tensor([False, False, True, True, False, True])
    assert anchors_of(mask, 9).tolist() == [1, 2, 4] and len(anchors_of(mask, 2)) == 2


def test_pards_rows_see_what_they_will_see_when_served() -> None:
    torch.manual_seed(0)
    rows = pard_rows(6, torch.tensor([1, 2, 3, 4]), depth=3, ratio=0.5, least=0.0)
    seen = rows.visible()
    names = [(k, t) for k, t in zip(rows.masks.tolist(), rows.last.tolist(), strict=True)]
    assert names[:6] == [(0, t) for t in range(6)]
    chains = {k: {t for kk, t in names if kk == k} for k in (1, 2)}
    assert len(chains[1]) == 2 and chains[2] <= chains[1], "half of them, then half of those"
    for row, (k, last) in enumerate(names):
        assert rows.positions[row] == last + k < 6
        expected = {(0, t) for t in range(last + 1)} | {(j, last) for j in range(1, k + 1)}
        assert {names[i] for i in range(len(names)) if bool(seen[row, i])} == expected
    assert rows.ids(torch.arange(10, 16), 99).tolist() == [10, 11, 12, 13, 14, 15] + [99] * (len(names) - 6)


# Overfitting one text


@pytest.fixture(scope="module")
def tiny(tiny_pair: tuple[Path, Path]) -> Target:
    return load_target(tiny_pair[0], LoadConfig(self_test=False, packed=False))


PROMPT, LENGTH = [5, 20, 41, 7, 33, 90, 12], 40


def features(target: Target, taps: tuple[int, ...]) -> Features:
    """The target's own greedy text, and what it saw in it."""
    with Engine(target) as engine:
        out = engine.generate(PROMPT, Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True))
    ids = torch.tensor([*PROMPT, *out.token_ids])
    target.set_taps(taps)
    slot = target.open(ids.tolist(), "training")
    found = target.extend([slot], [ids]).taps
    target.close(slot)
    target.set_taps(())
    return Features(ids, torch.arange(len(ids)) >= len(PROMPT), {layer: rows[:len(ids)].clone() for layer, rows in found.items()})


def learnt(task: Task, text: Features, steps: int, lr: float) -> Iterator[dict[str, float]]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW([p for p in task.module.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, 2 * (1 - step / steps))
        loss, figures = task.loss([text])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield {"loss": loss.item(), **figures}


def accepted_per_round(target: Target, drafter: Any, depth: int) -> float:
    with Engine(target, drafter, depth) as engine:
        out = engine.generate(PROMPT, Sampling(temperature=0, max_tokens=LENGTH, ignore_eos=True))
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    return float(out.metrics["accepted"]) / float(out.metrics["rounds"])


SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 16, "inner": 128}


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark"])
def test_a_head_that_learnt_one_text_is_accepted_to_the_end_of_its_block(kind: str, tiny: Target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    of: dict[str, Any] = {"dflash": (DFlashTask, DFlash, {"block": 8}), "dflash2": (DFlash2Task, DFlash2, {"block": 8, "rank": 16}),
                          "dspark": (DSparkTask, DSpark, {"block": 7, "rank": 16})}
    learns, make, sizes = of[kind]
    task: DFlashTask = learns(make.fresh(tiny.parts, layers=1, **sizes, **SIZES))
    with torch.inference_mode(False):
        text = features(tiny, task.taps)
        shown = list(learnt(task, text, 150, 8e-3))
    assert shown[-1]["accepted"] > shown[0]["accepted"] + 2
    task.save(tmp_path)
    serves = {"dflash": DFlashDrafter, "dflash2": DFlash2Drafter, "dspark": DSparkDrafter}[kind]
    drafter = serves(make.read(read_files(tmp_path), tiny.parts, tiny.vocab_size), tiny.vocab_size)
    assert accepted_per_round(tiny, drafter, 7) > 5.0, "seven guesses a round; the text's end cuts the last one"


def test_a_model_that_learnt_one_text_fills_all_its_masks(tiny: Target, tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    lm = CausalLM.read(tiny_pair[1])
    task = PardTask(lm, tiny.parts, mask_token=2, depth=6, ratio=0.9)
    with torch.inference_mode(False):
        shown = list(learnt(task, features(tiny, task.taps), 150, 1e-2))
    assert shown[-1]["loss"] < 0.5 * shown[0]["loss"]
    task.save(tmp_path)
    drafter = PardDrafter.from_spec(str(tmp_path), {}, Site(tiny, "match", LoadConfig(self_test=False)))
    assert accepted_per_round(tiny, drafter, 6) > 4.0

"""`model` with another vocabulary: the text and its law are the target's own, at token level and at string level."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from contract.table_rounds import SharedNoise, Text, check_budget, plain, rows_of, speculate
from drafters.tongues import OTHER, TEXT, Parrot, byte_level, letters, metaspace, spelling, word_piece, wrapped
from scipy.stats import chi2
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from draftproof import Engine, EngineConfig, LoadConfig, Sampling, VocabularyMismatch
from draftproof.commands.doctor import pair_checks
from draftproof.core.probs import distribution
from draftproof.core.tree import depths
from draftproof.drafters import build
from draftproof.drafters.string_level import StringLevel
from draftproof.drafters.translate import TokenLevel, TranslatedLm, pair
from draftproof.drafters.vocabulary import Spelling, Words, counterpart, shared
from draftproof.errors import CacheFull
from draftproof.models.fake import TableTarget
from draftproof.models.load import load_target
from draftproof.models.tokenizer import Tokenizer
from draftproof.types import Budget

A, B, M = byte_level(330), byte_level(400, OTHER, eos="<end>"), metaspace(420)
GREEDY = Sampling(temperature=0.0, top_p=1.0, max_tokens=40)
FALSE_ALARM = 1e-6


def table(tokenizer: Tokenizer, seed: int = 1, **more: Any) -> TableTarget:
    return TableTarget(len(tokenizer.hf), seed=seed, sharpness=3.0, tokenizer=tokenizer, **more)


def drafter_of(level: str, target: TableTarget, lm: TableTarget) -> Any:
    mine, own = Spelling.of(Words.of(target)), Spelling.of(Words.of(lm))
    assert mine is not None
    if level == "string":
        return StringLevel(lm, mine, prefill_chunk=7)
    assert own is not None
    return TokenLevel(TranslatedLm(lm, mine, own), prefill_chunk=7)


# What tokens mean


def test_contents_are_bytes_whatever_the_kind() -> None:
    for tokenizer, kind in ((A, "byte-level"), (M, "metaspace")):
        words = spelling(tokenizer)
        assert words.kind == kind
        for text in (TEXT, "  two  spaces", "naïve ☃ 𝔘"):
            ids = tokenizer.encode_plain(text)
            assert words.written(ids).decode().removeprefix(" " if kind == "metaspace" and not text.startswith(" ") else "") == text
            assert words.words.inside(" dog " + text)[-1:] == ids[-1:]
        for data in (b" the quick", "世".encode(), "世".encode()[:2], b"\xff\x00", b"fox"):
            found = words.spell(data)
            assert found is not None and words.written(found) == data
    assert len(spelling(A).spell(b" the") or ()) == 1, "a token of its own"
    assert Spelling.of(Words(word_piece(), 200)) is None and Spelling.of(Words(None, 9)) is None


def test_special_tokens_are_equal_by_name_only() -> None:
    a, b, m = spelling(A), spelling(B), spelling(M)
    for one, two in ((a, b), (a, m), (m, b)):
        pairs = shared(one, two)
        assert len(pairs) > 100 and all(one.contents[i] == two.contents[j] for i, j in pairs)
        assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
        special = {one.contents[i] for i, _ in pairs if isinstance(one.contents[i], str)}
        assert special == ({"<s>"} if (one, two) == (a, b) else set())
    assert counterpart("</s>", a.words, b.words) == "<end>" and counterpart("<|user|>", a.words, b.words) == b"<|user|>"


def test_rows_behind_the_models_output_are_no_tokens() -> None:
    short = Spelling.of(Words(A, 300))
    assert short is not None and max(short.contents) == 299 and max(short.ids.values()) == 299


def test_a_text_is_read_byte_for_byte_and_the_place_follows_it() -> None:
    """Random ids, characters cut anywhere; after every cut the logits are those of a fresh reading, and only shared tokens have any."""
    target, lm = table(A), table(M, seed=2)
    model = TranslatedLm(lm, spelling(A), spelling(M))
    tokens = [*A.encode_plain(TEXT[:150]), *torch.randint(2, 330, (40,), generator=torch.Generator().manual_seed(3)).tolist()]
    own, ends = model.whole(tokens)
    assert spelling(M).written(own) == spelling(A).written(tokens) and len(ends) == len(tokens) + 1 and ends[-1] == len(own)
    slot = model.open(tokens)
    outside = torch.ones(target.vocab_size, dtype=torch.bool)
    outside[model.ids] = False
    for keep, upto in ((0, 30), (12, 60), (59, 61), (61, 100), (3, len(tokens))):
        model.truncate(slot, keep)
        got = model.extend([slot], [torch.tensor(tokens[keep:upto])]).logits[0]
        assert slot.length == upto and slot.inner.length == ends[upto]
        want = lm.law(own[:ends[upto]])
        assert torch.equal(got[model.ids], want[model.columns]) and bool((got[outside] == -torch.inf).all())


def test_a_front_of_its_own_stands_once_before_the_text() -> None:
    target, lm = spelling(byte_level(330, front=True)), spelling(metaspace(420, front=True))
    model = TranslatedLm(table(metaspace(420, front=True)), target, lm)
    for text in (target.words.tokenizer.encode("the fox"), target.words.tokenizer.encode_plain("the fox")):   # type: ignore[union-attr]
        own, ends = model.whole(text)
        assert own[0] == 1 and own.count(1) == 1 and ends[-1] == len(own)


# The law is unchanged


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "filters": {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    "history": {"temperature": 0.9, "repetition_penalty": 1.3, "logit_bias": {40: 5.0, 41: -5.0}, "bad_word_ids": ((50, 51),)},
}


@pytest.mark.parametrize("level", ["token", "string"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_text_is_plain_decodings(level: str, options: str) -> None:
    for one, two in ((A, B), (A, M), (M, A)):
        target, lm = table(one), table(two, seed=2)
        sampling = Sampling(**{"top_p": 1.0, "max_tokens": 14, **OPTIONS[options]})
        texts = [Text.of(one.encode_plain(TEXT[5 * i:40 + 9 * i]), sampling, seed=i, id=str(i)) for i in range(3)]
        expected = [plain(target, text) for text in texts]
        drafter = drafter_of(level, target, lm)
        tree = drafter.needs.tree

        def follows(states: Sequence[Any], lm: TableTarget = lm) -> None:
            for state in states:
                inner = state.slot.inner if level == "token" else state.slot
                own = state.slot.own if level == "token" else state.own
                assert inner.tokens == own[:len(inner.tokens)]

        speculate(target, drafter, texts, lambda i, r, tree=tree: ((1, 3, 5)[(i + r) % 3], 9 if tree else 5), follows)
        assert [text.tokens for text in texts] == expected
        assert not target.open_slots and not lm.open_slots


def test_the_same_words_under_other_ids_accept_everything() -> None:
    """Token level loses nothing: the target's own law, its ids shuffled, is right about every token, at any temperature, in trees too."""
    shuffle = torch.randperm(len(A.hf), generator=torch.Generator().manual_seed(5))
    pieces = {piece: int(shuffle[i]) for piece, i in A.vocabulary.items()}
    target, lm = table(A), table(A)
    own = Spelling(Words(A, len(A.hf)), "byte-level", {int(shuffle[i]): c for i, c in spelling(A).contents.items()},
                   {c: int(shuffle[i]) for c, i in spelling(A).ids.items()})
    back = torch.cat([torch.argsort(shuffle), torch.tensor([len(pieces)])])
    lm.table = target.table[back][:, torch.argsort(shuffle)]
    for temperature, nodes in ((0.0, 4), (1.0, 4), (1.0, 10)):
        drafter = TokenLevel(TranslatedLm(lm, spelling(A), own))
        texts = [Text.of([5, 6, 7 + i], Sampling(temperature=temperature, top_p=1.0, max_tokens=25), seed=i, id=str(i)) for i in range(3)]
        log = speculate(target, drafter, texts, lambda i, r, n=nodes: (4, n))
        assert all(len(v.accepted) == max(depths(d.parents)) for d, v in zip(log.drafts, log.verdicts, strict=True) if len(d))


PIECES_P, PIECES_Q = ["a", "b", "c", "d", "e"], ["x", "d", "b", "y", "a", "z"]     # three in common


def test_the_law_is_the_one_that_was_drawn_from() -> None:
    """q renormalised over the shared tokens, and 3,000 first children against it (χ², false alarm 1e-6)."""
    target, lm = table(letters(PIECES_P)), table(letters(PIECES_Q), seed=4)
    lm.table = (lm.table / 3).log_softmax(-1)
    drafter, counts = drafter_of("token", target, lm), torch.zeros(5, dtype=torch.float64)
    law = torch.full((1, 5), -torch.inf, dtype=torch.float64)
    law[0, [0, 1, 3]] = lm.law([2])[[4, 2, 1]]                    # after "b", which is 2 there: a, b and d
    expected = distribution(law, [rows_of(Text.of([1], Sampling(temperature=0.9, top_p=1.0)), [()])])[0].exp()
    for start in range(0, 3000, 100):
        texts = [Text.of([1], Sampling(temperature=0.9, top_p=1.0), seed=start + i, id=str(i)) for i in range(100)]
        states = [drafter.open(text, None) for text in texts]
        for draft in drafter.propose(states, [Budget(1, 1, "", "")] * 100, SharedNoise(keep_law=True)):
            counts[draft.tokens[0]] += 1
            assert torch.allclose(draft.law.logq[0].double().exp(), expected, atol=1e-6)
    seen = expected > 0
    assert int(counts[~seen].sum()) == 0
    assert float(((counts - 3000 * expected)[seen] ** 2 / (3000 * expected[seen])).sum()) < chi2.isf(FALSE_ALARM, 2)


@pytest.mark.parametrize(("level", "rule", "tree"), [("token", "ratio", None), ("token", "ratio", 5), ("token", "block", None),
                                                     ("string", "ratio", None)])
def test_the_law_of_the_text_is_the_targets(level: str, rule: str, tree: int | None) -> None:
    """Tokens 1 to 3 of 1,000 texts against their exact law, 125 of them (χ² over the cells with 5 or more expected, false alarm 1e-6)."""
    target, lm, runs = table(letters(PIECES_P)), table(letters(PIECES_Q), seed=4), 1000
    for each in (target, lm):
        each.table = (each.table / 3).log_softmax(-1)
    counts, drafted = Counter[tuple[int, ...]](), 0
    config = EngineConfig(trace="none", max_batch=256)
    with Engine(target, drafter_of(level, target, lm), 2, tree=tree, rule=rule, config=config) as engine:  # type: ignore[arg-type]
        handles = [engine.submit([1], Sampling(temperature=1.0, top_p=1.0, seed=seed, max_tokens=4))[0] for seed in range(runs)]
        while not all(handle.done for handle in handles):
            engine.step()
        assert not engine.speculation.failure
        for handle in handles:
            counts[handle.completion().token_ids[:3]] += 1
            drafted += handle.completion().metrics["drafted"]
    assert drafted > runs / 4, drafted
    p = target.table.exp()
    chance = {(i, j, k): float(p[1, i] * p[i, j] * p[j, k]) for i in range(5) for j in range(5) for k in range(5)}
    common = {cell: x for cell, x in chance.items() if runs * x >= 5}
    rest = 1 - sum(common.values())
    cells = [(counts[cell], runs * x) for cell, x in common.items()] + [(runs - sum(counts[c] for c in common), runs * rest)]
    assert len(cells) > 20
    assert sum((seen - want) ** 2 / want for seen, want in cells) < chi2.isf(FALSE_ALARM, len(cells) - 1)


def test_options_that_leave_no_shared_token_end_the_guess_not_the_drafter() -> None:
    target, lm = table(letters(PIECES_P)), table(letters(PIECES_Q), seed=4)
    sampling = Sampling(temperature=1.0, top_p=1.0, max_tokens=12, seed=1, logit_bias={0: -torch.inf, 1: -torch.inf, 3: -torch.inf})
    with Engine(target, drafter_of("token", target, lm), 3) as engine:
        done = engine.generate([1], sampling)
        assert not engine.speculation.failure and set(done.token_ids) <= {2, 4} and done.metrics["drafted"] == 0
        assert any("none of the tokens that both models have" in e.draft_reason for e in done.trace if e.event == "round_done")
        assert engine.generate([1], Sampling(temperature=1.0, top_p=1.0, max_tokens=12, seed=1)).metrics["drafted"] > 0
    assert all(slot.length <= 1 for slot in lm.open_slots)


# String level


@pytest.mark.parametrize("mine", ["byte-level", "metaspace"])
@pytest.mark.parametrize("own", ["byte-level", "metaspace", "word-piece"])
def test_what_is_written_on_continues_the_texts_own_ids(mine: str, own: str) -> None:
    """A drafter that knows the text, asked after every token of it: what it offers are the next tokens of the text."""
    target = A if mine == "byte-level" else M
    said = TEXT.splitlines()[0] if own == "word-piece" else TEXT
    lm = Parrot({"byte-level": B, "metaspace": metaspace(380, OTHER), "word-piece": word_piece()}[own], said)
    ids = target.encode_plain(said)
    drafter, right, asked = drafter_of("string", table(target), lm), 0, 0
    text = Text.of(ids[:1], GREEDY)
    state = drafter.open(text, None)
    for at in range(1, len(ids)):
        draft, = drafter.propose([state], [Budget(4, 4, "", "")], SharedNoise())
        check_budget(draft, Budget(4, 4, "", ""), len(target.hf))
        found = draft.tokens.tolist()
        words = spelling(target)
        if own != "word-piece":
            assert words.written(ids).startswith(words.written(ids[:at] + found)), "the same letters, in whatever tokens"
        right += next((i for i, (a, b) in enumerate(zip(found, ids[at:], strict=False)) if a != b), min(len(found), len(ids) - at))
        asked += min(4, len(ids) - at)
        text.tokens.append(ids[at])
        drafter.observe([state], [None], [None])                                               # type: ignore[list-item]
        assert state.slot.tokens == state.own[:state.slot.length] and state.slot.length < len(state.own)
    assert right / asked > (0.5 if own == "word-piece" else 0.7), right / asked


def test_a_text_in_other_tokens_than_its_own_tokenizers_is_continued_from_where_it_ends() -> None:
    """Letter by letter, and in the middle of a character: tokenising it again gives other ids, and the guess still fits."""
    words, said = spelling(A), "over the lazy dog 你好世界 and"
    data = said.encode()
    for at in range(1, len(data)):
        single = [words.ids[data[i:i + 1]] for i in range(at)]
        drafter = drafter_of("string", table(A), Parrot(B, said))
        draft, = drafter.propose([drafter.open(Text.of(single, GREEDY), None)], [Budget(6, 6, "", "")], SharedNoise())
        assert len(draft) and data.startswith(words.written([*single, *draft.tokens.tolist()]))


@pytest.mark.parametrize("said", ["the fox</s> jumps over the dog", "the fox<s> jumps over the dog"])
def test_special_tokens_written_as_text_are_not_meant(said: str) -> None:
    text = Text.of(A.encode_plain("the"), GREEDY)
    drafter = drafter_of("string", table(A), Parrot(metaspace(420), said))
    draft, = drafter.propose([drafter.open(text, None)], [Budget(8, 8, "", "")], SharedNoise())
    assert A.decode(draft.tokens.tolist()) == " fox" and not A.special_ids & set(draft.tokens.tolist())


@pytest.mark.parametrize("special", [False, True])
def test_a_token_behind_the_rows_of_the_targets_output_is_never_offered(special: bool) -> None:
    """Added to its tokenizer, not to the model: the draft model writes its name."""
    backend = Backend.from_str(A.backend.to_str())
    (backend.add_special_tokens if special else backend.add_tokens)([AddedToken("<image>", normalized=False)])
    target = TableTarget(len(A.hf), seed=1, sharpness=3.0, tokenizer=wrapped(backend, bos_token="<s>", eos_token="</s>"))
    drafter = drafter_of("string", target, Parrot(metaspace(420), "the fox <image> jumps over the dog"))
    for said in ("the", "the fox", "the fox "):
        draft, = drafter.propose([drafter.open(Text.of(target.tokenizer.encode_plain(said), GREEDY), None)], [Budget(8, 8, "", "")],
                                 SharedNoise())
        check_budget(draft, Budget(8, 8, "", ""), target.vocab_size)


@pytest.mark.parametrize(("token", "kept"), [("<s>", [0]), ("<end>", [])])
def test_a_special_token_of_the_drafters_is_offered_only_if_the_target_has_it(token: str, kept: list[int]) -> None:
    lm = table(B)
    lm.table[:, B.vocabulary[token]] = 9.0
    text = Text.of(A.encode_plain("the fox"), GREEDY)
    for level, found in (("string", kept), ("token", kept * 2)):
        drafter = drafter_of(level, table(A), lm)
        draft, = drafter.propose([drafter.open(text, None)], [Budget(2, 2, "", "")], SharedNoise())
        tokens = draft.tokens.tolist()
        assert tokens == found if kept or level == "string" else not A.special_ids & set(tokens)


def test_a_long_text_is_closed_piece_by_piece_and_stays_what_it_is() -> None:
    target, lm = table(A), table(M)
    ids = A.encode_plain((TEXT + OTHER) * 8)
    drafter, text = drafter_of("string", target, lm), Text.of(ids[:3], GREEDY)
    state = drafter.open(text, None)
    for at in range(3, len(ids), 7):
        text.tokens += ids[at:at + 7]
        drafter.observe([state], [None], [None])                                               # type: ignore[list-item]
        assert len(state.open) <= 600
    whole = M.encode_plain((TEXT + OTHER) * 8)
    assert len(state.closed) > 600 and M.decode(state.own) == M.decode(whole) and abs(len(state.own) - len(whole)) < 20


# Both


@pytest.mark.parametrize("level", ["token", "string"])
def test_an_abandoned_draft_leaves_no_trace(level: str) -> None:
    target, lm = table(A), table(B, seed=3)
    drafter, texts = drafter_of(level, target, lm), [Text.of(A.encode_plain(t), GREEDY, id=t) for t in ("the fox ", "def add(a")]
    states, budgets = [drafter.open(text, None) for text in texts], [Budget(4, 4, "", ""), Budget(3, 3, "", "")]
    first, second = (drafter.propose(states, budgets, SharedNoise()) for _ in range(2))
    assert [d.tokens.tolist() for d in first] == [d.tokens.tolist() for d in second]
    texts[0].tokens += A.encode_plain(" dog")
    moved = drafter.propose(states, budgets, SharedNoise())[0]
    fresh = drafter.propose([drafter.open(texts[0], None)], budgets[:1], SharedNoise())[0]
    assert moved.tokens.tolist() == fresh.tokens.tolist()
    drafter.close(states[1])
    gone = drafter.propose(states, budgets, SharedNoise())[1]
    assert not len(gone) and gone.reason


class Narrow(TableTarget):
    """Has no room beyond so many tokens in all."""

    tokens = 40

    def extend(self, slots: Any, tokens: Any) -> Any:
        if sum(slot.length for slot in self.open_slots) + sum(len(t) for t in tokens) > self.tokens:
            raise CacheFull("all pages are in use")
        return super().extend(slots, tokens)


@pytest.mark.parametrize("level", ["token", "string"])
def test_guesses_end_with_a_reason(level: str) -> None:
    """At the drafter's context, counted in its own tokens, and where its cache is full; the text goes on."""
    target, ids = table(A), A.encode_plain(TEXT[:180])
    lm = table(M, context=30)
    own = len(TranslatedLm(lm, spelling(A), spelling(M)).whole(ids)[0])
    assert own > 30
    drafter = drafter_of(level, target, lm)
    draft, = drafter.propose([drafter.open(Text.of(ids, GREEDY), None)], [Budget(4, 4, "", "")], SharedNoise())
    assert not len(draft) and "of the drafter's tokens, is longer than its context of 30" in draft.reason
    text = Text.of(ids[:12], Sampling(temperature=0.0, top_p=1.0, max_tokens=60))
    expected = plain(target, text)
    log = speculate(target, drafter, [text], lambda i, r: (4, 4))
    assert text.tokens == expected and len(log.drafts[0]) and "is longer than its context of 30" in log.drafts[-2].reason
    assert not lm.open_slots
    full = Narrow(len(M.hf), tokenizer=M)
    text = Text.of(ids[:12], Sampling(temperature=0.0, top_p=1.0, max_tokens=60))
    log = speculate(target, drafter_of(level, target, full), [text], lambda i, r: (4, 4))
    assert text.tokens == expected and "no room in the drafter's cache" in log.drafts[-2].reason


# Choosing


def test_the_probability_of_the_shared_tokens_decides() -> None:
    target, lm = table(A), table(B)
    both = {j for _, j in shared(spelling(A), spelling(B))}
    for share, level in ((0.9, TokenLevel), (0.3, StringLevel)):
        lm.table = torch.full_like(lm.table, -torch.inf)
        for ids, mass in ((both, share), (set(range(lm.vocab_size)) - both, 1 - share)):
            lm.table[:, list(ids)] = torch.tensor(mass / len(ids), dtype=torch.float64).log()
        drafter = pair(target, lm)
        assert type(drafter) is level and not lm.open_slots
        vocabulary = drafter.checks[0]
        assert vocabulary.name == "vocabulary" and vocabulary.ok and f"with {share:.0%} of its probability" in vocabulary.detail
        assert all(not check.fatal for check in drafter.checks[1:])
    assert type(pair(target, table(word_piece()))) is StringLevel


def test_what_cannot_be_translated_is_refused_as_before() -> None:
    with pytest.raises(VocabularyMismatch, match="the drafter's tokens of table-"):
        pair(table(word_piece()), table(A))
    with pytest.raises(VocabularyMismatch, match="9 in the target and 8 in the drafter"):
        pair(TableTarget(9), TableTarget(8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    return make_model(folder / "target", A.hf, 64, 2, seed=1), make_model(folder / "draft", M.hf, 32, 1, seed=2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_from_folders_through_the_engine(folders: tuple[Path, Path], temperature: float) -> None:
    load = LoadConfig(device="cpu", page_tokens=16, prefill_chunk=8, cache_tokens=2048, self_test=False)
    target = load_target(folders[0], load)
    lm = load_target(folders[1], load)
    words, own = Spelling.of(Words.of(target)), Spelling.of(Words.of(lm))
    assert words is not None and own is not None
    chosen = build(f"model:{folders[1]}", target, "match", load)
    assert type(chosen) in (TokenLevel, StringLevel) and "of its probability on a sample text" in chosen.checks[0].detail   # type: ignore[union-attr]
    report = pair_checks(target, f"model:{folders[1]}", load)
    assert any("tokens are the target's too" in check.detail for check in report) and all(check.ok or not check.fatal for check in report)
    prompts = [TEXT[:70], "def add(", TEXT[:70] + " 世"]
    wishes = [Sampling(temperature=temperature, top_p=0.95, seed=i, max_tokens=30, ignore_eos=True) for i in range(3)]
    with Engine(target) as engine:
        plain = [engine.generate(p, s).token_ids for p, s in zip(prompts, wishes, strict=True)]
    for drafter in (chosen, TokenLevel(TranslatedLm(lm, words, own)), StringLevel(lm, words)):
        with Engine(target, drafter, 4) as engine:                                              # type: ignore[arg-type]
            handles = [engine.submit(p, s)[0] for p, s in zip(prompts, wishes, strict=True)]
            while not all(handle.done for handle in handles):
                engine.step()
            assert not engine.speculation.failure
            assert [handle.completion().token_ids for handle in handles] == plain
            assert sum(handle.completion().metrics["drafted"] for handle in handles) > 20
    lm.check()                                                                                  # type: ignore[attr-defined]
    assert not lm.slots                                                                         # type: ignore[attr-defined]

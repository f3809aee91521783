"""A prompt is scored as a draft that is known to stand: how likely its tokens are, and the text that it would have had anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from engine.engine_support import full, table, to_the_end
from models.test_recurrent import load as load_recurrent
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftproof import Completion, Draft, Engine, EngineConfig, OptionError, Sampling
from draftproof.config import LoadConfig
from draftproof.engine import batch
from draftproof.engine.logprobs import FLOOR
from draftproof.models.load import load_target
from draftproof.models.target import Target

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 9, 1, 3, 2, 8, 8, 4, 5, 6, 7, 8, 5], [3, 1, 4, 1, 5], [7]]
ASKED = [Sampling(temperature=0.9, seed=i, max_tokens=24, logprobs=2, ignore_eos=True) for i in range(3)]
KINDS = ("table", "paged", "cropped", "recurrent")


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    if request.param == "table":
        return table()
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "recurrent":
        return load_recurrent("qwen3_5_text", folder)[1]
    if request.param == "paged":
        folder = request.getfixturevalue("tiny_pair")[0]
    else:
        families.save("xglm", folder)
    found = load_target(folder, LoadConfig(device="cpu", self_test=False, page_tokens=16), fused=request.param != "cropped")
    assert found.facts.tier == KINDS.index(request.param)
    return found


def answers(target: Target, told: int | None, chunk: int = 512, drafter: str = "none") -> list[Completion]:
    asked = [replace(sampling, prompt_logprobs=told) for sampling in ASKED]
    load, config = LoadConfig(prefill_chunk=chunk), EngineConfig(profile_s=0)
    with Engine(target, drafter, "auto" if drafter == "none" else 3, load=load, config=config) as engine:
        return engine.generate_batch(PROMPTS, asked)


@pytest.fixture(scope="module")
def plain(target: Target) -> list[Completion]:
    return answers(target, None)


def close(found: Completion, logp: Tensor, ids: Sequence[int], told: int) -> None:
    """logp [n, V]: after each token of `ids`."""
    entries = found.prompt_logprobs
    assert entries is not None and [entry.token_id for entry in entries] == list(ids)
    assert entries[0].logprob is None and entries[0].top == ()
    for row, entry, token in zip(logp, entries[1:], ids[1:], strict=False):
        assert entry.logprob == pytest.approx(max(float(row[token]), FLOOR), abs=2e-4)
        best = row.topk(told)
        assert [each.probability for each in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert [float(row[each.token]) for each in entry.top] == pytest.approx(best.values.tolist(), abs=2e-4)


@pytest.mark.parametrize(("chunk", "drafter"), [(512, "none"), (4, "none"), (7, "ngram:min=1,max=2")])
def test_the_text_is_as_it_was(target: Target, plain: list[Completion], chunk: int, drafter: str) -> None:
    """Whatever the prompts are read in, beside each other and beside others that did not ask."""
    found = answers(target, 3, chunk, drafter)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert [len(one.prompt_logprobs or ()) for one in found] == list(map(len, PROMPTS))
    assert all(one.prompt_logprobs is None for one in plain)


def test_what_an_answer_was_told_is_what_it_is_told_as_a_prompt(target: Target, plain: list[Completion]) -> None:
    """To the bit where rows stand alone, and in another order of sums elsewhere."""
    with Engine(target, config=EngineConfig(profile_s=0)) as engine:
        for prompt, sampling, one in zip(PROMPTS, ASKED, plain, strict=True):
            again = engine.generate([*prompt, *one.token_ids], replace(sampling, prompt_logprobs=2, max_tokens=1))
            assert again.prompt_logprobs is not None and one.logprobs is not None
            told = again.prompt_logprobs[len(prompt):]
            if target.facts.tier == 0:
                assert told == one.logprobs
            assert [entry.token_id for entry in told] == list(one.token_ids)
            assert [entry.logprob for entry in told] == pytest.approx([entry.logprob for entry in one.logprobs], abs=2e-4)


def test_how_full_the_cache_is(target: Target) -> None:
    """What is spoken for counts, whether it is written yet or not; what is kept for later prompts alone does not."""
    assert target.filled() == 0
    if target.facts.tier:
        pool = getattr(target, "pool", None)
        whole = getattr(target, "cache_tokens", None) or (pool.capacity - 1) * pool.page_tokens       # type: ignore[union-attr]
        slot = target.open([1, 2, 3], room=45)
        assert target.filled() == pytest.approx(48 / whole)
        target.extend([slot], [torch.arange(1, 41)])
        assert target.filled() == pytest.approx(48 / whole)
        target.close(slot)
        assert target.filled() == 0


def test_a_law_that_is_known() -> None:
    target = table()
    for prompt, one in zip(PROMPTS, answers(target, 3), strict=True):
        close(one, torch.stack([target.law(prompt[:at + 1]) for at in range(len(prompt))]), prompt, 3)


def test_transformers_says_the_same(tiny_pair: tuple[Path, Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_pair[0], dtype=torch.float32).eval()
    target = load_target(tiny_pair[0], LoadConfig(device="cpu", self_test=False, page_tokens=16))
    for prompt, one in zip(PROMPTS, answers(target, 4, chunk=5), strict=True):
        with torch.inference_mode():
            close(one, model(torch.tensor([prompt])).logits[0].log_softmax(-1), prompt, 4)


def test_to_the_bit_on_the_built_in_target() -> None:
    """A prompt of its own answer, whose prefix is in the cache by then: the very numbers that the answer had, guessed or not."""
    with Engine(drafter="ngram", depth=4) as engine:
        done = engine.generate("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n", temperature=0.6, seed=3, max_tokens=60, logprobs=5)
        asked = Sampling(prompt_logprobs=5, max_tokens=1, temperature=0)
        prompt = engine.target.tokenizer.encode("def add(a, b):\n    return a + b\n\ndef sub(a, b):\n")       # type: ignore[union-attr]
        again = engine.generate([*prompt, *done.token_ids], asked)
    assert done.metrics["accepted"] and again.prompt_logprobs is not None
    assert again.prompt_logprobs[len(prompt):] == done.logprobs
    assert again.trace[0].cached_tokens == 0                 # type: ignore[union-attr]


def test_few_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    target, widths = table(), list[int]()
    score = target.score

    def counted(slots: Any, roots: Tensor, drafts: Sequence[Draft]) -> Any:
        widths.extend(len(draft) + 1 for draft in drafts)
        return score(slots, roots, drafts)

    monkeypatch.setattr(target, "score", counted)
    want = answers(target, 2)
    assert max(widths) == len(PROMPTS[0])
    monkeypatch.setattr(batch, "SCORED", 3 * 3 * target.vocab_size)
    widths.clear()
    found = answers(target, 2)
    assert max(widths) == 8 and widths[:3] == [4, 4, 1] and 7 in widths      # nine: half at least for the oldest, others' ends first
    assert [one.prompt_logprobs for one in found] == [one.prompt_logprobs for one in want]


@pytest.mark.parametrize("part", ["score", "rewind"])
@pytest.mark.parametrize(("error", "when"), [(error, when) for error, most in ((KeyboardInterrupt, 8), (RuntimeError, 4))
                                             for when in range(1, most + 1)])
def test_a_pass_that_is_interrupted(part: str, error: type[BaseException], when: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it and behind it, over all prompts and over one; nothing is told twice, and nothing is left out."""
    target = table()
    want = answers(target, 2)
    real, calls = getattr(target, part), list[int]()

    def once(*about: object) -> object:
        calls.append(1)
        found = real(*about) if when % 2 else None
        if len(calls) == (when + 1) // 2:
            raise error("once")
        return found if when % 2 else real(*about)

    monkeypatch.setattr(target, part, once)
    asked = [replace(sampling, prompt_logprobs=2) for sampling in ASKED]
    with Engine(target, load=LoadConfig(prefill_chunk=4), config=full()) as engine:
        handles = [engine.submit(prompt, sampling)[0] for prompt, sampling in zip(PROMPTS, asked, strict=True)]
        to_the_end(engine, handles)
        for handle, one in zip(handles, want, strict=True):
            found = handle.completion()
            assert (found.token_ids, found.prompt_logprobs) == (one.token_ids, one.prompt_logprobs), found.error
    assert not target.open_slots


def test_every_sample_and_the_stream() -> None:
    target = table()
    with Engine(target) as engine:
        done = engine.generate(PROMPTS[0], temperature=1.0, seed=2, n=2, max_tokens=5, prompt_logprobs=1)
        events = list(engine.stream(PROMPTS[0], temperature=1.0, seed=2, max_tokens=5, prompt_logprobs=1))
    assert [one.prompt_logprobs for one in done.samples] == [done.prompt_logprobs] * 2
    assert events[0].prompt_logprobs == done.prompt_logprobs and not any(event.prompt_logprobs for event in events[1:])


@pytest.mark.parametrize("said", [-1, 1.5, True, 257])
def test_what_is_refused(said: object) -> None:
    with Engine(table()) as engine, pytest.raises(OptionError, match=f"prompt_logprobs={said}.*expected"):
        engine.generate([1, 2], prompt_logprobs=said)


def test_what_cannot_be_is_a_number() -> None:
    target = table()
    target.table[..., 3] = -math.inf
    target.table = target.table.log_softmax(-1)
    with Engine(target) as engine:
        done = engine.generate([1, 3, 2], max_tokens=1, prompt_logprobs=0)
    assert done.prompt_logprobs is not None and done.prompt_logprobs[1].logprob == FLOOR and done.prompt_logprobs[1].top == ()

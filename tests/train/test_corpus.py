"""What becomes of a log's lines: which are learnt from, how an answer ends, and with which options it is written again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftproof.audition.logs import Exchange, Recorded, Skipped
from draftproof.audition.stories import Reader
from draftproof.audition.turns import NotReadable
from draftproof.config import LoadConfig
from draftproof.engine.engine import Engine
from draftproof.models.fake import TableTarget
from draftproof.models.load import load_target
from draftproof.models.target import Target
from draftproof.train.corpus import Text, apart, as_logged, end_of, regenerated, sampling_of, split

CHAT = ({"role": "user", "content": "total(values)"},)


@pytest.fixture(scope="module")
def target(tiny_pair: tuple[Path, Path]) -> Target:
    return load_target(tiny_pair[0], LoadConfig(threads=1, self_test=False))


def test_a_prompt_that_comes_again_is_on_one_side_alone() -> None:
    texts = [Text((1, 2, i % 5, i), 3) for i in range(40)]
    learn, held = split(texts, 0.4, 0)
    assert len(held) == 2 and len(learn) == 24 and not {t.prompt for t in learn} & {t.prompt for t in held}
    assert apart(texts, held) == learn


def test_a_document_and_a_conversation_are_on_one_side_but_for_one_whose_end_is_held_out() -> None:
    texts = [Text((line, part), 0, line=line) for line in range(6) for part in range(4)]
    learn, held = split(texts, 0.25, 3)
    both = {text.line for text in learn} & {text.line for text in held}
    assert len(held) == 6 and len(learn) == 18 and len(both) == 1
    assert [text.ids[1] for text in held if text.line in both] == [2, 3]
    assert learn == [text for text in texts if text not in held]


def test_a_conversation_whose_turns_came_as_requests_of_their_own_is_on_one_side() -> None:
    """As chats leave them in a server's log: every request brings the turns before."""
    turns = [Text((talk, 1, *range(2 + 3 * turn), 60 + turn, 70), 4 + 3 * turn, line=1 + 8 * turn + talk) for turn in range(4)
             for talk in range(8)]
    for seed in range(4):
        learn, held = split(turns, 0.25, seed)
        talks = [{text.ids[0] for text in side} for side in (learn, held)]
        assert len(held) == 8 and not talks[0] & talks[1], talks


def test_what_is_mixed_in_is_of_no_document_that_is_held_out() -> None:
    held = [Text((1, 2, 3, 4, 5), 3), Text((9, 9, 9), 0)]
    general = [Text((1, 2, 3, 4, 5, 6, 7), 0, line=1), Text((8, 8), 0, line=1), Text((2, 3, 4), 0, line=2), Text((9, 9, 9), 0)]
    assert apart(general, held) == [general[2]]


def test_a_prompt_that_loses_its_beginning_is_told(target: Target, tmp_path: Path) -> None:
    log = [Exchange(1, prompt_ids=(5,) * 9, answer_ids=(6, 7)), Exchange(2, prompt_ids=(5,) * 8, answer_ids=(6,)),
           Exchange(3, prompt_ids=(5,) * 60)]
    skipped = Skipped()
    assert [text.answer_from for text in as_logged(log, target, 16, skipped)] == [8, 8, 0, 0, 0, 0]
    (said,) = skipped.remarks()
    assert said == "prompts cut to their last 8 tokens, half of --length 16; give a longer one: 1"
    skipped, table = Skipped(), TableTarget(9)
    with Engine(table) as engine:
        made = regenerated(log, engine, 16, 1, tmp_path / "answers.jsonl", skipped=skipped)
        again = regenerated(log, engine, 16, 1, tmp_path / "answers.jsonl")
    assert skipped.remarks()[0].endswith("one: 2") and [text.line for text in made] == [text.line for text in again] == [1, 2, 3]


def test_a_logged_answer_in_text_ends_as_the_target_ends_it(target: Target) -> None:
    def answer(**more: object) -> tuple[int, ...]:
        (text,) = as_logged([Exchange(1, **{"messages": CHAT, "answer": "result", **more})], target, 64)  # type: ignore[arg-type]
        return text.ids[text.answer_from:]

    plain = answer(finish_reason="length")
    assert 0 not in plain and plain
    assert answer() == answer(finish_reason="stop") == answer(messages=None, prompt="total") == (*plain, 0)
    assert answer(finish_reason="stop", sampling={"stop": ["\n"]}) == answer(finish_reason="tool_calls") == plain
    assert answer(answer=None, answer_ids=(4, 5)) == (4, 5)


def test_the_end_of_a_turn_is_the_one_that_the_template_writes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = target.tokenizer.hf.convert_tokens_to_ids("<|user|>")  # type: ignore[union-attr]
    monkeypatch.setattr(target, "eos_ids", (0, ends))
    monkeypatch.setattr(target.tokenizer.hf, "chat_template",  # type: ignore[union-attr]
                        "{% for m in messages %}{{ m['content'] }}<|user|>\n{% endfor %}")
    assert end_of(target, chat=True) == [ends] and end_of(target, chat=False) == [0]


def test_a_conversation_without_an_answer_and_ids_that_are_no_tokens_teach_nothing(target: Target) -> None:
    skipped = Skipped()
    log = [Exchange(1, messages=CHAT * 9), Exchange(2, messages=CHAT, answer="result"), Exchange(3, prompt_ids=(1, 2), answer_ids=(9999,)),
           Exchange(4, messages=({"role": "user", "content": ""},) * 9, answer="")]
    assert len(list(as_logged(log, target, 64, skipped))) == 1 and skipped.count == 3
    assert "line 1: a conversation without an answer" in skipped.shown[0] and "token id 9999" in skipped.shown[1]


def test_what_was_asked_of_somebody_who_said_nothing_teaches_nothing(target: Target) -> None:
    skipped, prompt = Skipped(), tuple(range(20))
    log = [Exchange(1, prompt_ids=prompt, answer_ids=()), Exchange(2, prompt="total(a) " * 9, answer=""), Exchange(3, prompt_ids=prompt)]
    assert [text.line for text in as_logged(log, target, 64, skipped)] == [3] and skipped.count == 2
    assert skipped.shown[0] == "line 1: a request without an answer, and --as-logged has none written"


def test_a_template_s_refusal_is_the_line_s(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target.tokenizer.hf, "chat_template", "{{ raise_exception('no such role') }}")  # type: ignore[union-attr]
    skipped = Skipped()
    assert not list(as_logged([Exchange(5, messages=CHAT, answer="x")], target, 64, skipped)) and "no such role" in skipped.shown[0]


def test_a_trace_of_other_tokens_teaches_nothing(target: Target) -> None:
    pieces = tuple(target.tokenizer.piece(token) for token in range(target.vocab_size))  # type: ignore[union-attr]
    traced = Exchange(1, prompt_ids=(40, 50, 60), answer_ids=(70,), recorded=Recorded("mine", pieces))
    other = replace(traced, line=2, recorded=Recorded("theirs", (*pieces[:70], "XYZ", *pieces[71:])))
    skipped = Skipped()
    assert [text.ids for text in as_logged([traced, other], target, 64, skipped)] == [(40, 50, 60, 70)]
    assert skipped.count == 1 and "line 2: traced with target theirs, whose token 70 is 'XYZ'" in skipped.shown[0]
    assert not Reader.of(target).story(other, skipped) and Reader.of(target).story(traced, skipped)
    assert Reader().story(other, skipped), "a drafter that copies needs no target"


def test_every_option_of_the_log_that_there_is_is_asked_for() -> None:
    asked = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "logit_bias": {"5": 3}, "stop": "\n", "presence_penalty": 1, "min_tokens": 90,
             "stop_token_ids": [3], "response_format": {"type": "text"}, "n": 3, "seed": 7, "logprobs": True}
    wish = sampling_of(Exchange(1, prompt_ids=(1,), sampling=asked, max_tokens=40), 30, "0 1")
    assert (wish.temperature, wish.top_p, wish.top_k, wish.logit_bias, wish.stop) == (0.5, 0.9, 0, {5: 3}, ("\n",))
    assert (wish.presence_penalty, wish.min_tokens, wish.max_tokens, wish.stop_token_ids, wish.n) == (1, 30, 30, (3,), 1)
    for wrong in ({"temperature": "hot"}, {"top_k": -2}, {"logit_bias": [3]}, {"top_p": 0}, {"min_tokens": "a"}, {"logit_bias": {"x": 1}}):
        with pytest.raises(NotReadable):
            sampling_of(Exchange(1, prompt_ids=(1,), sampling=wrong), 30, "0 1")


def test_a_table_has_no_template() -> None:
    assert end_of(TableTarget(9), chat=True) == []

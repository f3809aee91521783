"""What the tests of the engine share: targets whose law is known, options that cover everything, and the counting identities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftproof import Completion, Engine, EngineConfig, Sampling
from draftproof.drafters.base import Drafter
from draftproof.drafters.fixed import AlwaysWrong, Oracle
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.engine.engine import Request
from draftproof.models.fake import TableTarget
from draftproof.trace.report import requests

VOCABULARY, EOS = 11, 10
LENGTH = 40
DEAD = 4            # behind it the options of a dead end leave nothing; its texts never go there


def nothing_after(token: int) -> tuple[tuple[int, int], ...]:
    """Bad words that leave no token behind this one."""
    return tuple((token, other) for other in range(VOCABULARY))


OPTIONS: dict[str, Sampling] = {
    "greedy": Sampling(temperature=0, seed=1, max_tokens=LENGTH),
    "warm": Sampling(temperature=0.7, seed=2, max_tokens=LENGTH),
    "top_k": Sampling(temperature=1.0, top_k=3, seed=3, max_tokens=LENGTH),
    "top_p": Sampling(temperature=1.3, top_p=0.8, seed=4, max_tokens=LENGTH),
    "min_p": Sampling(temperature=1.0, min_p=0.2, seed=5, max_tokens=LENGTH),
    "repetition": Sampling(temperature=0.6, repetition_penalty=1.3, seed=6, max_tokens=LENGTH),
    "presence": Sampling(temperature=0.8, presence_penalty=0.7, seed=7, max_tokens=LENGTH),
    "frequency": Sampling(temperature=0, frequency_penalty=0.4, seed=8, max_tokens=LENGTH),
    "bias": Sampling(temperature=1.0, logit_bias={3: 2.0, 4: float("-inf")}, seed=9, max_tokens=LENGTH),
    "bad_words": Sampling(temperature=0.9, bad_word_ids=((2,), (5, 6), (7, 7, 1)), seed=10, max_tokens=LENGTH),
    "min_tokens": Sampling(temperature=1.0, min_tokens=12, seed=11, max_tokens=LENGTH),
    "stop_ids": Sampling(temperature=1.0, stop_token_ids=(6,), min_tokens=3, seed=12, max_tokens=LENGTH),
    "ignore_eos": Sampling(temperature=1.0, ignore_eos=True, seed=13, max_tokens=LENGTH),
    "logprobs": Sampling(temperature=0.8, logprobs=3, seed=14, max_tokens=LENGTH),
    "together": Sampling(
        temperature=0.9,
        top_k=8,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={1: 0.5},
        bad_word_ids=((3, 4),),
        min_tokens=5,
        stop_token_ids=(9,),
        logprobs=2,
        seed=15,
        max_tokens=LENGTH,
    ),
    "dead_end": Sampling(temperature=1.0, bad_word_ids=nothing_after(DEAD), logit_bias={DEAD: -20.0}, seed=17, max_tokens=LENGTH),
    "greedy_dead_end": Sampling(temperature=0, bad_word_ids=nothing_after(DEAD), logprobs=2, seed=18, max_tokens=LENGTH),
}
PROMPTS: list[list[int]] = [[1, 2, 3, 1, 2] + [i % 10] * (i % 4 + 1) for i in range(len(OPTIONS))]


def table(seed: int = 0, **more: object) -> TableTarget:
    """A target that knows two tokens of its past and seldom ends a text."""
    target = TableTarget(vocab_size=VOCABULARY, order=2, seed=seed, sharpness=1.5, eos_ids=(EOS,), **more)  # type: ignore[arg-type]
    target.table[..., EOS] -= 3
    target.table = target.table.log_softmax(-1)
    return target


def alone(target: TableTarget, prompt: Sequence[int], sampling: Sampling, **more: object) -> Completion:
    """Plain decoding of one request by itself: what every other way must equal."""
    with Engine(target=target, **more) as engine:  # type: ignore[arg-type]
        return engine.generate(prompt, sampling)


def to_the_end(engine: Engine, handles: Sequence[Request]) -> int:
    """Step, after every interruption again, until all are done; how many there were."""
    interrupted = 0
    while not all(handle.done for handle in handles):
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupted += 1
    return interrupted


def foresight(texts: Sequence[Sequence[int]]) -> Callable[[Sequence[int]], int]:
    """The next token of whichever of `texts` begins with what is asked; token 0 where none does."""

    def next_token(text: Sequence[int]) -> int:
        found = next((t for t in texts if len(t) > len(text) and list(t[: len(text)]) == list(text)), None)
        return 0 if found is None else found[len(text)]

    return next_token


def drafters(texts: Sequence[Sequence[int]]) -> dict[str, Callable[[], Drafter]]:
    """Every kind of guess, from never right to nearly always; texts are whole plain texts, prompt first."""
    ahead = foresight(texts)
    return {
        "ngram": lambda: NgramDrafter(1, 3),
        "model": lambda: ModelDrafter(table(seed=8)),
        "wrong": lambda: AlwaysWrong(VOCABULARY, ahead),
        "oracle": lambda: Oracle(ahead, decoys=2, wrong_at=lambda position: position % 5 == 0),
        "lost": lambda: Oracle(lambda text: DEAD, decoys=1),
    }


def full() -> EngineConfig:
    return EngineConfig(trace="full")


def check_counts(out: Completion) -> None:
    """The identities of the counting, from the metrics and from the trace."""
    m = out.metrics
    report = next(iter(requests(out.trace).values()))
    assert m == report.metrics()
    assert report.finish == out.finish_reason
    tally = report.tally
    rounds = [e for e in out.trace if e.event == "round_done"]
    assert len(rounds) == m["rounds"] and [e.round for e in rounds] == list(range(len(rounds)))
    assert tally.completion_tokens == out.completion_tokens
    assert m["target_passes"] == m["rounds"] + tally.prefill_passes
    assert m["passes_saved"] == out.completion_tokens - m["target_passes"]
    cut = [e for e in rounds if e.tokens[-1].role == "accepted"]
    assert all(e is rounds[-1] for e in cut) and (not cut or out.finish_reason == "stop")
    assert out.completion_tokens == 1 + sum(sum(n.fate == "accepted" for n in e.nodes) + 1 for e in rounds) - len(cut)
    assert [t.token for e in rounds for t in e.tokens] == list(out.token_ids[1:])
    assert [e.position for e in rounds] == [out.prompt_tokens + 1 + sum(len(r.tokens) for r in rounds[:i]) for i in range(len(rounds))]
    for e in rounds:
        assert len(e.nodes) <= max(e.depth, 10**6 if e.depth else 0)
        plain = e.tokens[-1].role
        assert (plain == "plain") == (not e.nodes) or plain == "accepted"

"""Sampled drafts on texts whose noise nobody kept: the formula against sampling, its bounds by enumeration of every law a log allows,
the rounds by enumeration of every way the guesses can fall, and all of it against the engine."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.audition import sampled
from draftproof.audition.logprobs import Seen, in_ids, read_places
from draftproof.audition.replay import Story, replay
from draftproof.audition.run import Arm, Work
from draftproof.audition.sampled import Named, chance, chances, expected_rounds, named
from draftproof.audition.stories import Reader
from draftproof.audition.workers import run
from draftproof.config import EngineConfig
from draftproof.core.choice import choose
from draftproof.core.edits import Rows
from draftproof.core.noise import key, key_rows
from draftproof.core.probs import distribution
from draftproof.drafters.model import ModelDrafter
from draftproof.engine.engine import Engine
from draftproof.models.fake import TableTarget
from draftproof.types import Sampling

V = 5
SAMPLED = Sampling(temperature=1.0, top_p=1.0)


def law(seed: int, count: int = V, sharp: float = 2.0) -> Tensor:
    source = random.Random(seed)
    mass = torch.tensor([source.expovariate(1) ** sharp + 1e-4 for _ in range(count)], dtype=torch.float64)
    return mass / mass.sum()


def exact(p: Tensor, q: Tensor, x: int) -> float:
    """The formula of docs/design.md, given that the target chose x."""
    return float(1 / torch.maximum(p, p[x] * q / q[x]).sum()) if q[x] else 0.0


def place(p: Tensor, x: int, likeliest: int) -> Seen:
    """What a log with so many likeliest tokens says."""
    top = p.argsort(descending=True)[:likeliest].tolist()
    return Seen(x, {token: float(p[token].log()) for token in dict.fromkeys((x, *top))})


def bounds(p: Tensor, q: Tensor, x: int, likeliest: int, sampling: Sampling = SAMPLED) -> tuple[float, float]:
    found = named(place(p, x, likeliest), sampling, len(p))
    return sampled.ANY if found is None else chance(found, q)


def tempered_each(laws: Tensor, sampling: Sampling) -> Tensor:
    return distribution(laws.log().float(), [Rows(sampling, (), 0, ((),) * len(laws), frozenset())]).double().exp()


def tempered(p: Tensor, sampling: Sampling) -> Tensor:
    return tempered_each(p[None], sampling)[0]


def test_the_formula_is_what_the_shared_noise_does() -> None:
    """The shipped choice under the shipped noise, 20,000 seeds: where the target says x, the share in which the drafter does."""
    p, q, draws = law(1), law(2), 20_000
    keys = key_rows([key(seed, 0, "text", 3) for seed in range(draws)], "cpu")
    target, drafter = (choose(one.log().float().expand(draws, -1), keys) for one in (p, q))
    for x in range(V):
        here = target == x
        share, count = float((drafter[here] == x).double().mean()), int(here.sum())
        if count > 200:
            assert abs(share - exact(p, q, x)) < 4.5 * math.sqrt(0.25 / count)


def test_everything_named_is_exact() -> None:
    for seed, x in itertools.product(range(20), range(V)):
        p, q = law(seed), law(seed + 100)
        low, high = bounds(p, q, x, V)
        assert low == pytest.approx(exact(p, q, x), abs=1e-9) and high == pytest.approx(low, abs=1e-9)


@cache
def splits(parts: int, steps: int) -> Tensor:
    """Every way to share so many steps out among the parts, [N, parts]."""
    return torch.tensor([whole for whole in itertools.product(range(steps + 1), repeat=parts) if sum(whole) == steps], dtype=torch.float64)


def compatible(p: Tensor, seen: Seen, steps: int) -> Tensor:
    """Every law on a grid that the log allows [N, V]: the mass of unnamed tokens in any way below the last of the likeliest."""
    free = [token for token in range(len(p)) if token not in seen.logprobs]
    if not free:
        return p[None]
    cap = min([math.exp(v) for token, v in seen.logprobs.items() if token != seen.token], default=1.0)
    found = splits(len(free), steps) * p[free].sum() / steps
    found = found[found.amax(-1) <= cap + 1e-12]
    return p.expand(len(found), -1).index_copy(-1, torch.tensor(free), found)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("likeliest", [1, 2, 3])
def test_the_bounds_hold_for_every_law_that_the_log_allows(likeliest: int, temperature: float) -> None:
    sampling, covered, tight = replace(SAMPLED, temperature=temperature), 0, []
    for seed in range(40):
        p, q = law(seed), tempered(law(seed + 100), sampling)
        for x in range(V):
            low, high = bounds(p, q, x, likeliest, sampling)
            laws = tempered_each(compatible(p, place(p, x, likeliest), 12), sampling)
            values = 1 / torch.maximum(laws, laws[:, x:x + 1] * q / q[x]).sum(-1)                  # `exact` of each
            least, most = float(values.min()), float(values.max())
            assert low - 1e-6 <= least and most <= high + 1e-6
            covered += len(values)
            tight.append((most - least + 0.02) / (high - low + 0.02))
    assert covered > 1000
    assert sum(tight) / len(tight) > (0.55 if likeliest == 1 else 0.65), "not much wider than the ignorance"


@pytest.mark.parametrize("more", [{"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.8}, {"top_p": 0.6, "min_p": 0.2},
                                  {"top_k": 4}, {"top_p": 0.999}])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_filters(more: dict[str, Any], temperature: float) -> None:
    """Where the likeliest show what the filters leave, the law is known; otherwise nothing is claimed."""
    sampling, resolved, left = replace(SAMPLED, temperature=temperature, **more), 0, 0
    for seed in range(60):
        p, q = law(seed), tempered(law(seed + 100), sampling)
        mine = tempered(p, sampling)
        for x in [token for token in range(V) if mine[token] > 0]:
            low, high = bounds(p, q, x, 3, sampling)
            assert low - 1e-6 <= exact(mine, q, x) <= high + 1e-6
            resolved += high - low < 1e-6
            left += (low, high) == sampled.ANY
            full = bounds(p, q, x, V, sampling)
            assert full == pytest.approx((exact(mine, q, x),) * 2, abs=1e-6)
    assert resolved if "top_k" not in more or more["top_k"] < 4 and more.get("top_p", 0) < 0.9 else left


def test_tokens_without_a_name_widen_the_bounds_and_nothing_else() -> None:
    p, q = law(3), law(4)
    order = p.argsort(descending=True).tolist()
    whole = place(p, order[0], 4)
    unnamed = Seen(order[0], {token: value for token, value in whole.logprobs.items() if token != order[1]}, (whole.logprobs[order[1]],))
    found, full = named(unnamed, SAMPLED, V), named(whole, SAMPLED, V)
    assert found is not None and full is not None
    inner, outer = chance(full, q), chance(found, q)
    values = [outer[0], inner[0], exact(p, q, order[0]), inner[1], outer[1]]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(values)) and outer[1] - outer[0] > inner[1] - inner[0] + 1e-6


def brute(likely: list[float], depth: int, last: int) -> float:
    """Expected rounds by enumeration of every way the guesses can fall."""
    n, whole = len(likely) + 1, 0.0
    for falls in itertools.product((True, False), repeat=n - 1):
        weight, at, rounds = 1.0, 1, 0
        for stands, chance_of in zip(falls, likely, strict=True):
            weight *= chance_of if stands else 1 - chance_of
        while at < n:
            kept = 0
            while kept < min(depth, last - at, n - at) and falls[at + kept - 1]:
                kept += 1
            at += kept + 1
            rounds += 1
        whole += weight * rounds
    return whole


def test_expected_rounds_by_enumeration() -> None:
    source = random.Random(0)
    for n, depth in itertools.product((1, 2, 5, 9), (1, 2, 4, 9)):
        likely = [source.random() for _ in range(n - 1)]
        for last in (n - 1, n + 3):
            fewest, most = expected_rounds([(a, a) for a in likely], depth, last)
            assert fewest == pytest.approx(most) and fewest == pytest.approx(brute(likely, depth, last))
            between = [(max(0, a - 0.2 * source.random()), min(1, a + 0.2 * source.random())) for a in likely]
            low, high = expected_rounds(between, depth, last)
            for _ in range(5):
                other = [source.uniform(*pair) for pair in between]
                assert low - 1e-9 <= brute(other, depth, last) <= high + 1e-9


# --- with models


def target() -> TableTarget:
    return TableTarget(9, order=2, seed=1, sharpness=2.0)


def small() -> ModelDrafter:
    return ModelDrafter(TableTarget(9, order=2, seed=1, sharpness=1.2), 9)


PROMPTS = [(1, 2, 3), (4, 5), (7, 1, 7), (2,)]


def written(seed: int, logprobs: int, temperature: float = 0.8) -> list[dict[str, Any]]:
    """Records of a log that an engine wrote which keeps its noise for itself."""
    options = Sampling(temperature=temperature, top_p=1.0, seed=seed, max_tokens=24, logprobs=logprobs)
    with Engine(target(), config=EngineConfig(trace="none")) as engine:
        done = [engine.generate(prompt, options) for prompt in PROMPTS]
    return [{"prompt_token_ids": prompt, "token_ids": out.token_ids, "max_tokens": 24, "finish_reason": out.finish_reason,
             "temperature": temperature, "logprobs": [{"token_id": each.token_id, "logprob": each.logprob, "top": [
                 {"token_id": one.token, "logprob": one.probability} for one in each.top]} for each in out.logprobs or ()]}
            for prompt, out in zip(PROMPTS, done, strict=True)]


def heard(records: list[dict[str, Any]], folder: Path, depths: tuple[int, ...]) -> list[dict[str, Any]]:
    log = folder / "log.jsonl"
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    model = target()
    work = Work(str(log), tuple(Arm("model", depth) for depth in depths), Reader.of(model), model, lambda spec: small())
    return run(work).cells()


def test_the_bounds_meet_where_every_token_was_logged(tmp_path: Path) -> None:
    """… and are then what redrawing the noise gives: texts with other seeds, replayed, over those that happen to begin alike."""
    cells = heard(written(1, 9), tmp_path, (1, 4))
    for cell in cells:
        assert cell["figure"] == "greedy" and cell["sampled"]["requests"] == 4
        assert cell["sampled"]["low"] == pytest.approx(cell["sampled"]["high"], rel=1e-4)
    shallow, deep = (cell["sampled"]["low"] for cell in cells)
    assert 1.2 < shallow < deep < 5


@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_fewer_logged_tokens_give_wider_bounds_around_the_same(tmp_path: Path, temperature: float) -> None:
    found = {}
    for logprobs in (9, 4, 2):
        (cell,) = heard(written(3, logprobs, temperature), tmp_path, (3,))
        found[logprobs] = cell["sampled"]
    for wide, narrow in ((2, 4), (4, 9)):
        assert found[wide]["low"] <= found[narrow]["low"] + 1e-6 and found[narrow]["high"] <= found[wide]["high"] + 1e-6
    assert found[2]["high"] - found[2]["low"] < 1.0


def test_the_engine_gets_what_is_expected(tmp_path: Path) -> None:
    """Over many seeds the engine's own rounds, with shared noise, are those expected from the logs of the same texts."""
    measured = expected = emitted = 0.0
    drafter, model = small(), target()
    for seed in range(25):
        for record in written(seed, 9):
            seen = in_ids(read_places(record["logprobs"]) or (), None)
            assert seen is not None
            story = Story(record["prompt_token_ids"], record["token_ids"], replace(SAMPLED, temperature=0.8), seed=seed,
                          limit=len(record["prompt_token_ids"]) + 24)
            (tally,) = replay(drafter, [story], 3)
            (likely,) = chances(drafter, [story], [seen], model.vocab_size)
            measured += tally.rounds
            expected += sum(expected_rounds(likely, 3, 23)) / 2
            emitted += tally.emitted
    assert emitted == 25 * 4 * 23
    assert measured == pytest.approx(expected, rel=0.03)


def test_what_has_no_bounds_says_nothing(tmp_path: Path) -> None:
    records = written(1, 5)
    for change in ({"temperature": None}, {"presence_penalty": 0.5}, {"logprobs": None}, {"logit_bias": {"3": 1}}):
        (cell,) = heard([{**record, **change} for record in records], tmp_path, (2,))
        assert cell["sampled"] is None and cell["figure"] == "greedy"
    (cell,) = heard([*records, {**records[0], "temperature": 0}], tmp_path, (2,))
    assert cell["figure"] == "mixed" and cell["exact_requests"] == 1 and cell["sampled"]["requests"] == 4


# --- reading


def test_every_form_of_logprobs() -> None:
    ours = [{"token_id": 3, "logprob": -0.5, "top": [{"token_id": 3, "logprob": -0.5}, {"token_id": 4, "logprob": -1.5}]}]
    chat = {"content": [{"token": "token_id:3", "logprob": -0.5, "bytes": None, "top_logprobs": [
        {"token": "token_id:3", "logprob": -0.5}, {"token": "token_id:4", "logprob": -1.5}]}]}
    columns = {"tokens": ["token_id:3"], "token_logprobs": [-0.5], "top_logprobs": [{"token_id:3": -0.5, "token_id:4": -1.5}]}
    for form in (ours, chat, columns):
        assert in_ids(read_places(form) or (), None) == (Seen(3, {3: -0.5, 4: -1.5}),)
    for broken in (None, [], {}, [1], [{"token": "a"}], [{"token_id": 1, "logprob": "x"}], {"tokens": [1], "token_logprobs": []},
                   [{"token_id": 1, "logprob": 2.0}], [{"token_id": 1, "logprob": -1, "top": [{"logprob": 0}]}]):
        assert read_places(broken) is None
    top = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -2.5}]
    words = read_places([{"token": "a", "logprob": -0.1, "top_logprobs": top}])
    assert words is not None and in_ids(words, None) is None
    assert in_ids(words, {"a": 7}.get) == (Seen(7, {7: -0.1}, (-2.5,)),)      # type: ignore[arg-type]


def test_a_named_place_puts_the_chosen_token_first() -> None:
    found = named(Seen(4, {1: math.log(0.5), 2: math.log(0.3), 4: math.log(0.1)}), SAMPLED, 6)
    assert isinstance(found, Named) and found.tokens == (4, 1, 2) and found.cap == pytest.approx(0.3)
    assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)

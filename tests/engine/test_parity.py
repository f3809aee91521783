"""Rule `match`: with any drafter, depth, shape and option the text is plain decoding's, token by token, alone or in a batch."""

from __future__ import annotations

import pytest
from engine.engine_support import OPTIONS, PROMPTS, alone, check_counts, drafters, full, table

from draftproof import Completion, Engine, EngineConfig

NAMES = ("ngram", "model", "wrong", "oracle", "lost")


@pytest.fixture(scope="module")
def plain() -> list[Completion]:
    target = table()
    return [alone(target, prompt, sampling) for prompt, sampling in zip(PROMPTS, OPTIONS.values(), strict=True)]


def texts(plain: list[Completion]) -> list[list[int]]:
    return [prompt + list(out.token_ids) for prompt, out in zip(PROMPTS, plain, strict=True)]


def test_the_texts_are_worth_comparing(plain: list[Completion]) -> None:
    reasons = [out.finish_reason for out in plain]
    assert "stop" in reasons and "length" in reasons
    assert any(out.token_ids[-1] == 10 for out in plain)
    assert sum(len(out.token_ids) for out in plain) > 350
    assert len({out.token_ids for out in plain}) == len(plain)
    for out in plain:
        check_counts(out)
        assert out.metrics["passes_saved"] == 0 and out.metrics["acceptance_length"] in (1.0, None)


@pytest.mark.parametrize("tree", [None, 12], ids=["chain", "tree"])
@pytest.mark.parametrize("depth", [1, 3, 7, "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_every_option_in_one_batch_equals_plain_alone(plain: list[Completion], name: str, depth: int | str, tree: int | None) -> None:
    target = table()
    drafter = drafters(texts(plain))[name]()
    if tree is not None and isinstance(depth, int) and depth > tree:
        tree = depth
    with Engine(target=target, drafter=drafter, depth=depth, tree=tree, config=EngineConfig(max_batch=5)) as engine:
        found = engine.generate_batch(PROMPTS, list(OPTIONS.values()))
        assert engine.speculation.state[0] == "on", engine.speculation.failure
    for option, want, got in zip(OPTIONS, plain, found, strict=True):
        assert got.token_ids == want.token_ids, option
        assert got.finish_reason == want.finish_reason, option
        assert got.seed == want.seed
        if want.logprobs is not None:
            assert got.logprobs == want.logprobs, option
        check_counts(got)
    assert not target.open_slots
    if name == "wrong":
        assert all(out.metrics["accepted"] == 0 for out in found)
    if name == "oracle" and depth == 3:
        assert sum(out.metrics["passes_saved"] for out in found) > 100


@pytest.mark.parametrize("rule", ["ratio", "block"])
@pytest.mark.parametrize("name", ["ngram", "model", "oracle", "lost"])
def test_greedy_requests_keep_plain_ids_under_the_joint_rules(plain: list[Completion], name: str, rule: str) -> None:
    target = table()
    drafter = drafters(texts(plain))[name]()
    with Engine(target=target, drafter=drafter, depth=4, rule=rule) as engine:  # type: ignore[arg-type]
        found = engine.generate_batch(PROMPTS, list(OPTIONS.values()))
    for sampling, want, got in zip(OPTIONS.values(), plain, found, strict=True):
        if sampling.greedy:
            assert got.token_ids == want.token_ids
        check_counts(got)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rule", ["match", "ratio", "block"])
def test_level_full_changes_nothing_and_tells_everything(plain: list[Completion], name: str, rule: str) -> None:
    target, make = table(), drafters(texts(plain))[name]
    trees = (None,) if rule == "block" else (None, 9)
    for tree in trees:
        seen = []
        for config in (EngineConfig(trace="none"), full()):
            with Engine(target=target, drafter=make(), depth=3, tree=tree, rule=rule, config=config) as engine:  # type: ignore[arg-type]
                seen.append(engine.generate_batch(PROMPTS[:8], list(OPTIONS.values())[:8]))
        for quiet, loud in zip(*seen, strict=True):
            assert quiet.token_ids == loud.token_ids and quiet.trace == ()
            check_counts(loud)
            rounds = [e for e in loud.trace if e.event == "round_done"]
            greedy = any(e.event == "request_started" and e.sampling["temperature"] == 0 for e in loud.trace)
            for e in rounds:
                assert all(t.p is not None and t.alternatives for t in e.tokens)
                assert all(n.p is not None for n in e.nodes)
                if not greedy and e.nodes:
                    assert all((n.noise is None) == (rule != "match") for n in e.nodes)
                    assert all((n.coin is None) == (rule == "match") for n in e.nodes)
                if name == "model" and not greedy:
                    assert all(n.q is not None for n in e.nodes)


def test_samples_of_a_request_differ_and_equal_themselves_alone() -> None:
    target = table()
    sampling = OPTIONS["warm"]
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=3) as engine:
        out = engine.generate([1, 2, 3], sampling, n=3)
    assert len(out.samples) == 3 and len({s.token_ids for s in out.samples}) == 3
    assert [s.sample for s in out.samples] == [0, 1, 2]
    assert out.samples[0].token_ids == alone(target, [1, 2, 3], sampling).token_ids == out.token_ids


def test_a_request_may_choose_its_own_rule_depth_or_no_drafter() -> None:
    target = table()
    sampling = OPTIONS["warm"]
    want = alone(target, [1, 2, 3], sampling)
    with Engine(target=target, drafter="ngram:min=1,max=2", depth=3, rule="ratio") as engine:
        handles = [
            engine.submit([1, 2, 3], sampling, speculation=s)[0]
            for s in ({"rule": "match", "depth": 5}, {"drafter": "none"}, {"rule": "match"}, {"depth": 0})
        ]
        while not all(handle.done for handle in handles):
            engine.step()
        outs = [handle.completion() for handle in handles]
    assert all(out.token_ids == want.token_ids for out in outs)
    assert [out.metrics["drafted"] > 0 for out in outs] == [True, False, True, False]
    assert outs[0].speculation["depth"] == 5 and outs[1].speculation["state"] == "off"

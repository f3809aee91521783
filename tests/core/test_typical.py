"""The lossy rule does what its formula says, says that it is lossy wherever it appears, and never runs unless it is named."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from draftproof import Completion, Engine, EngineConfig, OptionError, Sampling, SpeculationConfig
from draftproof.commands.console import guarantee, load_lines
from draftproof.commands.generate import generate
from draftproof.core.noise import gumbel, key, key_rows
from draftproof.core.tree import path
from draftproof.core.typical import DELTA, EPSILON, threshold, typical
from draftproof.core.verify import RULE_SHAPES, allowed, joint
from draftproof.drafters.base import Drafter
from draftproof.drafters.fixed import AlwaysWrong, Oracle
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.ngram import NgramDrafter
from draftproof.models.fake import TableTarget
from draftproof.types import LOSSY, RULES, Draft

V = 6
RULE = "lossy-typical"


def twin(parents: tuple[int, ...], tokens: list[int], p: list[list[float]]) -> list[tuple[int, ...]]:
    """Every longest path of typical nodes, by trying all paths; the definition, in plain Python."""
    def stands(node: int) -> bool:
        law = p[parents[node] + 1]
        entropy = -sum(x * math.log(x) for x in law if x > 0)
        return law[tokens[node]] > min(0.09, 0.3 * math.exp(-entropy))

    found: list[tuple[int, ...]] = [()]
    for node in range(len(parents)):
        way = path(parents, node)
        if all(stands(n) for n in way):
            found.append(way)
    longest = max(map(len, found))
    return [way for way in found if len(way) == longest]


@given(st.integers(0, 2**31), st.integers(0, 12), st.booleans(), st.sampled_from([0.3, 2.0, 6.0]))
def test_the_longest_typical_path_stands(seed: int, n: int, chain: bool, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    parents = tuple(i - 1 if chain else int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(n))
    tokens = torch.randint(0, V, (n,), generator=generator).tolist()
    logp = (torch.randn(n + 1, V, generator=generator, dtype=torch.float64) * sharpness).log_softmax(-1)
    choices = torch.randint(0, V, (n + 1,), generator=generator).tolist()
    verdict = typical(parents, tokens, logp, choices)
    best = twin(parents, tokens, logp.exp().tolist())
    assert verdict.accepted == best[0]
    end = verdict.accepted[-1] if verdict.accepted else -1
    assert verdict.next_token == choices[end + 1]
    assert verdict.rejected == tuple(i for i, parent in enumerate(parents) if parent == end)
    assert verdict.role == ("plain" if not n else "bonus" if end not in parents else "correction")


def test_the_threshold() -> None:
    flat, sure = torch.full((1, 8), 1 / 8).log(), torch.tensor([[0.0] + [-math.inf] * 7])
    """Medusa's: `posterior_threshold` 0.09 and `posterior_alpha` 0.3; each of the two decides somewhere."""
    even = torch.full((1, 2), 0.5).log()
    assert (EPSILON, DELTA) == (0.09, 0.3)
    assert float(threshold(flat)) == pytest.approx(DELTA / 8) and float(threshold(even)) == float(threshold(sure)) == EPSILON
    assert float(threshold(sure, epsilon=0.01)) == pytest.approx(0.01)


def test_at_temperature_0_only_the_argmax_is_typical() -> None:
    logp = torch.full((2, V), -math.inf)
    logp[:, 3] = 0
    assert typical((-1,), [3], logp, [3, 3]).accepted == (0,)
    assert typical((-1,), [2], logp, [3, 3]).accepted == ()


def test_no_guess_leads_into_a_dead_end() -> None:
    """However typical: the target's own choice may, and whoever goes on from there hears of it."""
    logp = torch.full((4, V), 1 / V).log()
    for dead, accepted in (((), (0, 2)), ((2,), (0,)), ((0,), (1,)), ((0, 1), ())):
        assert typical((-1, -1, 0), [3, 4, 5], logp, [1] * 4, dead).accepted == accepted
    assert typical((-1, 0), [3, 5], logp[:3], [3, 5, 1], (0,)).next_token == 3


def lossy(target: TableTarget, temperature: float, tree: int | None, drafter: Drafter | None = None) -> Completion:
    with Engine(target, drafter or ModelDrafter(TableTarget(V, seed=4)), 4, tree=tree, rule="lossy-typical",
                config=EngineConfig(trace="full")) as engine:
        return engine.generate([1, 2], Sampling(temperature=temperature, top_p=1.0, seed=3, max_tokens=60))


@pytest.mark.parametrize("tree", [None, 9])
def test_an_engine_writes_what_the_rule_lets_stand(tree: int | None) -> None:
    """Every accepted node was above its threshold and every refused one below; every other token is the target's choice."""
    target = TableTarget(V, seed=1, sharpness=2.5)
    done = lossy(target, 1.0, tree, AlwaysWrong(V) if tree else None)
    text, judged = [1, 2, done.token_ids[0]], {"accepted": 0, "rejected": 0}
    for round_ in (e for e in done.trace if e.event == "round_done"):
        for i, node in enumerate(round_.nodes):
            above = [round_.nodes[j].token for j in path([n.parent for n in round_.nodes], i)[:-1]]
            law = target.law(text + above)
            if node.fate in judged:
                judged[node.fate] += 1
                assert (float(law[node.token].exp()) > float(threshold(law[None]))) == (node.fate == "accepted")
        text += [t.token for t in round_.tokens]
        noise = gumbel(key_rows([key(3, 0, "text", len(text) - 1)], "cpu"), torch.arange(V))[0]
        if round_.tokens[-1].role != "accepted":
            assert text[-1] == int((target.law(text[:-1]) + noise).argmax())
    assert tuple(text[2:]) == done.token_ids and min(judged.values()) > 3


def test_the_text_is_another_one_and_at_temperature_0_the_same() -> None:
    target = TableTarget(V, seed=1, sharpness=1.0)
    for temperature, same in ((1.0, False), (0.0, True)):
        with Engine(target) as engine:
            plain = engine.generate([1, 2], Sampling(temperature=temperature, top_p=1.0, seed=3, max_tokens=60))
        assert (lossy(target, temperature, None).token_ids == plain.token_ids) == same


def test_it_accepts_more_than_match() -> None:
    target, lengths = TableTarget(V, seed=1, sharpness=1.0), {}
    for rule in ("match", RULE):
        with Engine(target, ModelDrafter(TableTarget(V, seed=4)), 4, rule=rule) as engine:    # type: ignore[arg-type]
            done = engine.generate([1, 2], Sampling(temperature=1.0, top_p=1.0, seed=3, max_tokens=200))
            lengths[rule] = done.metrics["acceptance_length"]
    assert lengths[RULE] > lengths["match"] + 0.5


def test_everything_it_touches_says_lossy() -> None:
    target = TableTarget(V, seed=1)
    with Engine(target, NgramDrafter(1, 2), 3, rule=RULE) as engine:
        done = engine.generate([1, 2], Sampling(temperature=1.0, top_p=1.0, seed=3, max_tokens=8))
        assert any("lossy" in line for line in load_lines(engine, 100))
        assert "lossy" in engine.stats()["speculation"]["rule"]
    assert done.speculation["rule"] == RULE
    assert guarantee(done.speculation, target.facts).startswith("lossy: the text is not the target's own")
    started = next(e for e in done.trace if e.event == "request_started")
    assert started.rule == RULE and all("lossy" in rule for rule in LOSSY)


def test_a_request_may_name_it_and_the_others_keep_their_own() -> None:
    target = TableTarget(V, seed=1)
    truth = Oracle(lambda text: int(target.law(text).argmax()))
    with Engine(target, truth, 3) as engine:
        asked, other = (engine.submit([1, 2], Sampling(temperature=1.0, top_p=1.0, seed=3, max_tokens=40), speculation=wish)[0]
                        for wish in ({"rule": RULE}, None))
        while not (asked.done and other.done):
            engine.step()
    with Engine(target) as engine:
        plain = engine.generate([1, 2], Sampling(temperature=1.0, top_p=1.0, seed=3, max_tokens=40)).token_ids
    assert asked.completion().speculation["rule"] == RULE and asked.completion().token_ids != plain
    assert other.completion().speculation["rule"] == "match" and other.completion().token_ids == plain


def test_it_is_never_the_default_and_never_recommended() -> None:
    assert RULES[-1] == RULE and {RULE} == LOSSY
    assert next(f.default for f in fields(SpeculationConfig) if f.name == "rule") == "match"
    assert RULE_SHAPES[RULE] == RULE_SHAPES["match"]
    with pytest.raises(OptionError, match="Use rule match or ratio, or") as caught:
        allowed("block", "tree", "eagle3")
    assert "lossy" not in str(caught.value)


def test_refusals_name_what_is_allowed() -> None:
    with pytest.raises(OptionError, match="rule='typical': expected one of match, ratio, block, lossy-typical"):
        SpeculationConfig(rule="typical")                                                     # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="needs the target's choices"):
        joint(RULE, Draft.empty(), torch.zeros(1, 2), torch.empty(0), None)
    refused = CliRunner().invoke(generate, ["x", "--rule", "typical"])
    assert refused.exit_code == 2 and "lossy-typical" in refused.output
    assert "lossy-typical keeps neither" in " ".join(CliRunner().invoke(generate, ["--help"]).output.split())

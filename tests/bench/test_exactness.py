"""benchmarks/exactness.py: kept laws pass, broken ones do not, by its statistics and by the whole of its way."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_module import FOLDER, benchmark
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftproof.models.load import WEIGHTS

exactness = benchmark("exactness")
RUNS, N, V = 200, 600, 24

SAMPLER = """
import sys
sys.path.insert(0, {folder!r})
flatter = 1.0 * {factor}
import torch
from transformers import AutoModelForCausalLM
from worker import main

def load(job):
    model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32)

    def generate(request, told):
        tokens = request["max_tokens"]
        dice, ids = torch.Generator().manual_seed(request["seeds"][0]), list(request["prompts"][0])
        for _ in range(tokens):
            law = (model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1] / (request["temperature"] * flatter + 1e-3)).softmax(-1)
            ids.append(int(torch.multinomial(law, 1, generator=dice)))
        return [ids[-tokens:]], None

    return generate

main(load, ())
"""


def tiny(folder: Path, seed: int) -> Path:
    """A model of random weights whose laws are neither flat nor sharp, with the built-in tokenizer."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                         max_position_embeddings=1024))
    model.lm_head.weight.data.mul_(15)
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(WEIGHTS / "target").save_pretrained(folder)
    return folder


def some_laws(dice: torch.Generator) -> Tensor:
    """Log-probabilities [N, V]; some tokens have no chance, some places no choice."""
    logits = 2 * torch.randn(N, V, generator=dice, dtype=torch.float64)
    logits[: N // 4, V // 2:] = -math.inf
    logits[: N // 20, 1:] = -math.inf
    return logits.log_softmax(-1)


def drawn(laws: Tensor, dice: torch.Generator) -> Tensor:
    return torch.multinomial(laws.exp(), 1, generator=dice)[:, 0]


def found(laws: Tensor, tokens: Tensor, dice: torch.Generator) -> Any:
    return exactness.Finding.of(exactness.places(laws, tokens, dice), *exactness.surprise(laws, tokens))


def test_a_kept_law_passes() -> None:
    """False alarms: of this test 200 in a million by `kept`; 1 in 10,000 by the shares of small p (binomial, 200 runs)."""
    dice = torch.Generator().manual_seed(1)
    findings = []
    for _ in range(RUNS):
        laws = some_laws(dice)
        findings.append(found(laws, drawn(laws, dice), dice))
    assert all(finding.kept for finding in findings)
    for p in ([f.p_surprise for f in findings], [f.p_places for f in findings]):
        assert 27 <= sum(value < 0.25 for value in p) <= 75, "p is uniform: 50 expected, deviation 6.1"


def greedy(laws: Tensor, draft: Tensor, dice: torch.Generator) -> Tensor:
    return laws.argmax(-1)


def at_another_temperature(laws: Tensor, draft: Tensor, dice: torch.Generator) -> Tensor:
    return drawn((1.25 * laws).log_softmax(-1), dice)


def guesses_always_stand(laws: Tensor, draft: Tensor, dice: torch.Generator) -> Tensor:
    return drawn(draft, dice)


def no_residual(laws: Tensor, draft: Tensor, dice: torch.Generator) -> Tensor:
    """A guess is judged as it should be; one that falls is drawn anew from the whole law, not from what the draft left of it."""
    guess = drawn(draft, dice)[:, None]
    stands = torch.rand(len(laws), generator=dice).log() < (laws.gather(1, guess) - draft.gather(1, guess))[:, 0]
    return torch.where(stands, guess[:, 0], drawn(laws, dice))


def ratio(laws: Tensor, draft: Tensor, dice: torch.Generator) -> Tensor:
    guess = drawn(draft, dice)[:, None]
    stands = torch.rand(len(laws), generator=dice).log() < (laws.gather(1, guess) - draft.gather(1, guess))[:, 0]
    rest = (laws.exp() - draft.exp()).clamp(min=0) + 1e-300 * laws.exp()
    return torch.where(stands, guess[:, 0], torch.multinomial(rest, 1, generator=dice)[:, 0])


@pytest.mark.parametrize(("way", "kept"), [(ratio, True), (greedy, False), (at_another_temperature, False), (guesses_always_stand, False),
                                           (no_residual, False)])
def test_ways_to_draw(way: Any, kept: bool) -> None:
    """The draft is the law, flattened and disturbed; false alarm of the kept one 1e-6."""
    dice = torch.Generator().manual_seed(2)
    laws = torch.cat([some_laws(dice) for _ in range(10)])
    draft = (0.5 * laws + torch.randn(laws.shape, generator=dice)).log_softmax(-1)
    assert found(laws, way(laws, draft, dice), dice).kept is kept


def test_a_token_without_a_chance_is_too_much() -> None:
    dice = torch.Generator().manual_seed(3)
    laws = torch.full((40, V), -math.inf, dtype=torch.float64)
    laws[:, 0] = 0
    assert found(laws, torch.zeros(40, dtype=torch.int64), dice).kept, "no choice, and the one token there is"
    impossible = found(laws, torch.ones(40, dtype=torch.int64), dice)
    assert impossible.excess == math.inf and not impossible.kept


def test_the_law_is_read_along_each_text() -> None:
    """In pieces behind one reading of the prompt, as in one pass over the whole."""
    reader = exactness.Reader(WEIGHTS / "target")
    texts = torch.randint(4, 4000, (exactness.TOGETHER + 3, 5), generator=torch.Generator().manual_seed(5))
    laws = reader.laws([5, 6, 7, 8], texts, 0.8)
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS / "target", dtype=torch.float32).eval()
    with torch.inference_mode():
        whole = model(torch.cat([torch.tensor([[5, 6, 7, 8]] * len(texts)), texts], 1)).logits[:, 3:-1]
    expected = (whole.double() / 0.8).log_softmax(-1).flatten(0, 1)
    assert (laws - expected).abs().max() < 1e-3


def test_engines_that_keep_the_law_and_one_that_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    for name, factor in (("sound", 1.0), ("hot", 1.6), ("dead", "'x'")):
        script = tmp_path / f"{name}.py"
        script.write_text(SAMPLER.format(folder=str(FOLDER / "peers"), factor=factor))
        monkeypatch.setitem(exactness.prepared.__globals__["PEERS"], name, sys.modules["crew"].Peer(script, Path(sys.executable)))
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- exactness: begin -->\nold\n<!-- exactness: end -->\nBehind.\n")
    monkeypatch.setattr(sys, "argv", ["exactness.py", "--as-is", "--target", str(tiny(tmp_path / "target", 1)), "--draft",
                                      str(tiny(tmp_path / "draft", 2)), "--peers", "ours,sound,hot,dead", "--depths", "2", "--prompts", "2",
                                      "--texts", "40", "--tokens", "6", "--threads", "1", "--work", str(tmp_path / "work"), "--write",
                                      str(page)])
    assert exactness.main() == 0, "what others do is a finding"
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = {(row["peer"], row["depth"]): row["kept"] for row in result["rows"]}
    assert kept == {(name, depth): name != "hot" for name in ("ours", "sound", "hot") for depth in (0, 2)}
    assert all((row["stood"] is None) is (row["peer"] != "ours" or not row["depth"]) for row in result["rows"])
    assert set(result["not_run"]) == {"dead plain", "dead K=2"} and all(row["tokens"] == 480 for row in result["rows"])
    text = page.read_text()
    assert "old" not in text and text.startswith("Before.") and text.endswith("Behind.\n") and text.count("**NO**") == 2
    for row in result["rows"]:
        row["kept"] = row["peer"] != "ours"
    assert exactness.verdict(result) == 3 and exactness.verdict({**result, "rows": []}) == 1
    assert exactness.verdict({**result, "rows": [], "asked": ["hot"]}) == 0

"""prove --peer transformers: right generation passes, whatever the rounding; assisted decoding that is wrong is found, and told from it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftproof.bench.prove_peer import prove_peer, spacing, tie
from draftproof.bench.prove_run import RunReport
from draftproof.cli import run
from draftproof.config import LoadConfig, ProveConfig
from draftproof.errors import Failure, LoadError
from draftproof.models.peer import TransformersPeer, assistant_place

VOCAB = 97
PROMPTS = [tuple((7 * i + j * j) % VOCAB for j in range(5 + i)) for i in range(6)]
CONFIG = ProveConfig(prompts=6, tokens=40, batch=3)


def model(folder: Path, seed: int, layers: int, sharp: float = 0.3) -> Path:
    config = LlamaConfig(vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None, pad_token_id=None,
                         initializer_range=sharp, dtype="float32")
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.random.set_rng_state(state)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and its twin with one layer less, which often agrees with it."""
    folder = tmp_path_factory.mktemp("peer")
    target = model(folder / "target", 1, 2)
    whole = LlamaForCausalLM.from_pretrained(target)
    whole.model.layers = whole.model.layers[:1]
    whole.config.num_hidden_layers = 1
    whole.save_pretrained(folder / "draft")
    return target, folder / "draft"


class Wrong(TransformersPeer):
    """Assisted decoding with a planted error: `spoil` sees each pass that scores guesses, and its logits."""

    def spoil(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        raise AssertionError

    def assisted(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[tuple[int, ...]], int]:
        with self._spoilt():
            return super().assisted(prompts, tokens)

    @contextmanager
    def _spoilt(self) -> Iterator[None]:
        def after(module: Any, positional: Any, given: dict[str, Any], out: Any) -> None:
            if out.logits.shape[1] > 1:
                self.spoil(given["input_ids"], out.logits)

        handle = self.model.register_forward_hook(after, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()


class Gullible(Wrong):
    """Takes every guess without a look."""

    def spoil(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        rows = logits.shape[1] - 1
        logits[0, torch.arange(rows), ids[0, -rows:]] += 100


class OneRowLate(Wrong):
    """Reads the logits of the row before."""

    def spoil(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        logits[:, 1:] = logits[:, :-1].clone()


class Rounded(Wrong):
    """Not wrong: its logits are moved by about one unit in the last place."""

    def spoil(self, ids: torch.Tensor, logits: torch.Tensor) -> None:
        eps = torch.finfo(logits.dtype).eps
        logits += logits * eps * torch.empty(logits.shape).uniform_(-1, 1, generator=torch.Generator().manual_seed(3)).to(logits.dtype)


def proved(kind: type[TransformersPeer], pair: tuple[Path, Path], dtype: str, depth: int | None = 4,
           config: ProveConfig = CONFIG) -> RunReport:
    return prove_peer(kind(*pair, depth, LoadConfig(dtype=dtype, device="cpu")), PROMPTS, config)


def words(report: RunReport) -> str:
    return "\n".join(f"{check.passed} {check.name}: {check.detail}" for check in report.checks)


@pytest.mark.parametrize("depth", [4, None])
def test_float32_is_identical(pair: tuple[Path, Path], depth: int | None) -> None:
    report = proved(TransformersPeer, pair, "float32", depth)
    assert report.as_json()["passed"], words(report)
    assert [(c.texts, c.identical) for c in report.comparisons] == [(6, 6), (6, 6)] and report.comparisons[1].tokens == 240
    assert "took no pass of their own" in report.checks[-1].detail


def test_bfloat16_parts_at_near_ties_only(pair: tuple[Path, Path]) -> None:
    report = proved(TransformersPeer, pair, "bfloat16")
    assert report.as_json()["passed"], words(report)
    assert all(d.near_tie and d.ulps is not None and d.gap is not None and d.gap <= 30 for c in report.comparisons for d in c.divergences)


def test_texts_moved_by_a_unit_in_the_last_place_are_near_ties(pair: tuple[Path, Path]) -> None:
    found = proved(Rounded, pair, "bfloat16", config=ProveConfig(prompts=6, tokens=120, batch=3)).comparisons[1].divergences
    assert found and all(d.near_tie and d.gap is not None and d.gap <= 8 for d in found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Gullible, OneRowLate])
def test_a_wrong_assisted_decoding_is_found(kind: type[Wrong], dtype: str, pair: tuple[Path, Path]) -> None:
    report = proved(kind, pair, dtype)
    wrong = [check for check in report.checks if not check.passed]
    assert wrong and "not a near tie" in wrong[0].detail and "prompt " in wrong[0].detail and wrong[0].name.startswith("assisted")
    errors = [d for d in report.comparisons[1].divergences if not d.near_tie]
    assert errors and all(d.gap is not None and d.gap > 4 for d in errors)
    assert all(d.near_tie for d in report.comparisons[0].divergences), "the control is not what was spoilt"


def test_prompt_lookup(pair: tuple[Path, Path]) -> None:
    peer = TransformersPeer(pair[0], None, 3, LoadConfig(dtype="float32", device="cpu"))
    report = prove_peer(peer, [(1, 2, 3, 4, 1, 2, 3, 4, 1, 2), *PROMPTS], ProveConfig(tokens=100, batch=2))
    assert report.as_json()["passed"], words(report)


def test_nothing_drafted_proves_nothing(pair: tuple[Path, Path]) -> None:
    """A drafter that is never right: every text is the target's, and nothing was shown."""
    class Opposite(TransformersPeer):
        def assisted(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[tuple[int, ...]], int]:
            return self.plain(prompts, tokens, 1), 0

    report = proved(Opposite, pair, "float32")
    assert not report.as_json()["passed"] and "nothing was put to the proof" in report.checks[-1].detail


def test_a_text_that_ends_early_is_an_error(pair: tuple[Path, Path]) -> None:
    class Short(TransformersPeer):
        def assisted(self, prompts: Sequence[Sequence[int]], tokens: int) -> tuple[list[tuple[int, ...]], int]:
            found, saved = super().assisted(prompts, tokens)
            return [found[0][:7], *found[1:]], saved

    report = proved(Short, pair, "float32")
    (case,) = report.comparisons[1].divergences
    assert (case.at, case.token, case.margin, case.near_tie) == (7, "(end)", None, False)
    assert "one text ended" in report.checks[0].detail and not report.checks[0].passed


def test_units_of_the_rounding() -> None:
    assert spacing(20.0, torch.bfloat16) == 0.125 and spacing(1.0, torch.float32) == torch.finfo(torch.float32).eps
    one = torch.tensor([[20.0, 19.875, 3.0], [19.875, 20.0, 3.0]])
    margin, gap, unit, near = tie(one, torch.bfloat16, 1, 0)
    assert (margin, gap, unit, near) == (0.125, 0.125, 0.125, True)
    assert tie(one, torch.bfloat16, 2, 0)[3] is False and tie(one[:1], torch.float32, 1, 0)[3] is False
    assert tie(one, torch.float32, 1, 0)[3] is True, "what rounding was seen to do here counts"


def test_the_command(tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
                     monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_pair
    asked = ["prove", "--peer", "transformers", "--target", str(target), "--drafter", f"model:{target}", "--depth", "3", "--prompts", "2",
             "--tokens", "16", "--batch", "2", "--html", str(tmp_path / "p.html"), "--json"]
    assert run(asked) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    run_level = document["levels"]["run"]
    assert document["passed"] and run_level["engine"].startswith("transformers 5") and run_level["dtype"] == "float32"
    assert document["failures"] == [] and "only the run" in document["levels"]["rule"]["skipped"]
    monkeypatch.setattr("draftproof.models.peer.TransformersPeer", Gullible)
    asked[asked.index(f"model:{target}")] = f"model:{draft}"
    assert run(asked) == 3
    said = capsys.readouterr()
    document = json.loads(said.out.splitlines()[-1])
    case = document["failures"][0]
    assert case["model"] == str(target) and case["dtype"] == "float32" and case["depth"] == 3 and case["temperature"] == 0
    assert not case["near_tie"] and case["gap"] > 4 and "not a near tie" in document["reasons"][0]
    page = (tmp_path / "p.html").read_text()
    assert "by model and sampling configuration" in page and "ERROR" in page and "model:" in page
    assert run([word for word in asked if word != "--json"]) == 3
    assert "ERROR" in capsys.readouterr().out


@pytest.mark.parametrize(("more", "says"), [
    (["--rule", "ratio"], "--rule with --peer"), (["--url", "http://h"], "--url with --peer"),
    (["--temperature", "0.7"], "share its noise"), (["--drafter", "suffix"], "expected model:PATH"), (["--level", "task"], "--level task"),
    (["--depth", "0"], "nothing to prove"), (["--tree", "9"], "--tree with --peer"),
])
def test_wrong_wishes(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "--peer", "transformers", *more]) == 2 and says in capsys.readouterr().err


def test_what_it_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="prompt lookup"):
        assistant_place("suffix")
    with pytest.raises(LoadError):
        TransformersPeer(tmp_path, None, 3, LoadConfig())

"""Tensor parallelism: what comes apart and what is refused; two real processes whose texts do not change with a guess."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import families
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from draftproof import Engine, Failure, LoadConfig, LoadError, OptionError, Sampling
from draftproof.models import following, load, shares
from draftproof.models.leading import LeadingTarget
from draftproof.models.load import builtin, load_target
from draftproof.models.shares import Summed, bare, divided, kept, load_share
from draftproof.models.tiled import TiledLinear
from draftproof.types import Draft

COMES_APART = {"llama": 7, "mistral": 7, "qwen2": 7, "qwen3": 7, "granite": 7, "starcoder2": 6, "phi": 6, "youtu": 3}  # products of a layer
Pair = tuple[Path, Path]
TWO = LoadConfig(tensor_parallel=2, dtype="float32", page_tokens=64, cache_tokens=4096)


class Pretended(shares.Ranks):
    """One of several processes, the sum over which is its own part."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return part


def share(folder: Path, rank: int, count: int = 2) -> nn.Module:
    model, info = load_share(str(folder), AutoConfig.from_pretrained(folder), torch.float32, Pretended(rank, count))
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", COMES_APART)
def test_shares_make_the_whole(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "phi", {})           # fc1 and fc2, whose numbers are no layers'
    families.save(family, tmp_path)
    whole = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    parts = [{name.replace(".part.", "."): p for name, p in share(tmp_path, rank).named_parameters()} for rank in (0, 1)]
    divided_ones = 0
    for name, full in whole.items():
        ours = [part[name] for part in parts]
        if ours[0].shape == full.shape:
            assert torch.equal(ours[0], full) and torch.equal(ours[1], full), name
        else:
            divided_ones += 1
            by_inputs = name.split(".")[-2] in ("o_proj", "down_proj", "c_proj", "dense", "fc2")
            assert torch.equal(torch.cat(ours, dim=1 if by_inputs else 0), full), name
    assert set(parts[0]) == set(whole) and divided_ones >= 3 * COMES_APART[family]


def test_a_sum_keeps_its_form_and_adds_the_bias_once() -> None:
    layer, x = nn.Linear(4, 3, bias=False), torch.randn(5, 4)
    summed = Summed(layer, nn.Parameter(torch.randn(3)), Pretended(0, 1))
    tiled = kept(summed, TiledLinear)
    assert isinstance(tiled, Summed) and isinstance(bare(tiled), TiledLinear) and bare(layer) is layer
    for form in (summed, tiled):
        assert torch.allclose(form(x), layer(x) + summed.bias)
    assert isinstance(kept(layer, TiledLinear), TiledLinear)


@pytest.mark.parametrize(("family", "count", "said"), [
    ("llama", 3, "num_attention_heads=4; expected a tensor_parallel that divides it"),
    ("llama", 4, "num_key_value_heads=2"),
    ("mixtral", 2, "comes apart in ways that are not supported"),
    ("gpt2", 2, "has no plan"),
    ("gpt_oss", 2, "has no plan"),
])
def test_what_does_not_come_apart_is_refused(family: str, count: int, said: str, tmp_path: Path) -> None:
    families.save(family, tmp_path)
    with pytest.raises(LoadError, match=said):
        load_target(tmp_path, LoadConfig(tensor_parallel=count))


def test_a_share_that_does_not_fit_its_model_is_refused_by_name(tmp_path: Path) -> None:
    families.save("gpt_neox", tmp_path)         # has a plan, and sizes of its own that a share does not change
    reasons: dict[str, str] = {}
    config, whole = LoadConfig(tensor_parallel=2), AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(LoadError, match="gpt_neox.layers.0.*tensor_parallel=2: GPTNeoXForCausalLM does not come apart.*use one device"):
        load._load_model(tmp_path, config, whole, torch.float32, torch.device("cpu"), Pretended(0, 2), reasons)


@pytest.mark.parametrize("heard", [0, 1])
def test_what_is_wrong_is_told_to_nobody_where_the_leader_has_ended(heard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own share did not fit either. A traceback followed the one line that says so."""
    said: list[str] = []

    class Line:
        def recv(self) -> tuple[object, ...]:
            return "nowhere", replace(TWO, device="cpu"), True, 1, "store"

        def send(self, what: str) -> None:
            if len(said) == heard:
                raise BrokenPipeError
            said.append(what)

    def loads(*_: object) -> None:
        raise LoadError("its share does not fit")

    monkeypatch.setattr(following, "Ranks", lambda *_: None)
    monkeypatch.setattr(following, "load_part", loads)
    following.follow(Line())  # type: ignore[arg-type]
    assert said == [""] * heard


def test_refusals_before_any_process_starts(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="tensor_parallel=0"):
        LoadConfig(tensor_parallel=0)
    with pytest.raises(LoadError, match="does not exist"):
        load_target(tmp_path / "nowhere" / "model", TWO)
    assert TWO.of_draft().tensor_parallel == 1
    with pytest.raises(LoadError, match="num_key_value_heads=3"):
        load_target(builtin("target"), TWO)
    families.save("llama", tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    plan = config.base_model_tp_plan
    for name in ("embed_tokens", "embed_in"):       # as transformers 5.17 has it where they are tied, and 5.24 by a family's own name
        config.base_model_tp_plan = {**plan, name: "embedding_rowwise"}
        assert divided(config, 2).num_attention_heads == config.num_attention_heads // 2
    config.base_model_tp_plan = {**plan, "layers.*.mlp.up_embed": "embedding_rowwise"}
    with pytest.raises(LoadError, match="not supported .embedding_rowwise."):
        divided(config, 2)
    config.base_model_tp_plan, config.quantization_config = plan, {"quant_method": "fp8"}
    with pytest.raises(LoadError, match="quantised"):
        divided(config, 2)


@pytest.fixture(scope="module")
def led(tiny_pair: Pair) -> Iterator[LeadingTarget]:
    target = load_target(tiny_pair[0], TWO)
    assert isinstance(target, LeadingTarget)
    yield target
    target._followers.end()


def test_two_processes_compute_what_one_does(led: LeadingTarget, tiny_pair: Pair) -> None:
    alone = load_target(tiny_pair[0], LoadConfig(dtype="float32", page_tokens=64, self_test=False))
    text = torch.arange(90) * 37 % led.vocab_size
    tree = Draft(torch.tensor([5, 6, 7, 8]), (-1, 0, -1, 2))
    found = []
    for target in (alone, led):
        target.set_taps([1])
        slot = target.open(text.tolist(), room=20)
        first = target.extend([slot], [text])
        scores = target.score([slot], torch.tensor([3]), [tree])
        found.append((first.logits.clone(), scores.logits.clone(), scores.taps[1].clone()))
        target.rewind(slot, (2, 3))
        target.truncate(slot, 70)
        found[-1] += (target.extend([slot], [text[70:75]]).logits.clone(),)
        target.close(slot)
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert (ours - theirs).abs().max() < 1e-3 * theirs.abs().max()
    assert led.facts.invisible, led.facts.invisible_reason
    assert led.parts.config.num_attention_heads == 2 * led._target.parts.config.num_attention_heads
    assert "2 processes" in led.facts.reasons["tensor parallel"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_change_no_text(temperature: float, led: LeadingTarget, tiny_pair: Pair) -> None:
    prompts = [[5, 9, 5, 9, 5], list(range(3, 90)), [8] * 70]
    sampling, texts = Sampling(temperature=temperature, max_tokens=24, seed=5, ignore_eos=True), {}
    model = f"model:{tiny_pair[1]}"
    for name, options in {"off": {}, "ngram": {"drafter": "ngram", "depth": 4}, "model": {"drafter": model, "depth": 3},
                          "tree": {"drafter": model, "depth": 3, "tree": 8}}.items():
        with Engine(led, load=TWO, **options) as engine:  # type: ignore[arg-type]
            done = engine.generate_batch(prompts, sampling)
            assert name == "off" or sum(one.metrics["drafted"] for one in done) > 0, done[0].speculation
        texts[name] = [one.token_ids for one in done]
    assert texts["ngram"] == texts["tree"] == texts["model"] == texts["off"]
    led.check()
    with pytest.raises(OptionError, match="layer-skip needs a target of tier 1 in one process.*2 processes"):
        Engine(led, "layer-skip:exit=2", load=TWO)


def test_a_full_cache_is_full_everywhere_and_harms_nothing(led: LeadingTarget) -> None:
    from draftproof import CacheFull

    slots = [led.open([1, 2, 3], tenant=str(i), room=1900) for i in range(2)]
    with pytest.raises(CacheFull):
        led.open(list(range(200)), tenant="late", room=1900)
    scores = [led.extend([slot], [torch.tensor([1, 2, 3])]).logits.clone() for slot in slots]
    assert torch.equal(*scores)
    for slot in slots:
        led.close(slot)
        led.close(slot)
    led.check()


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C, also where whoever started the tests does not listen to it (as a shell's background jobs)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("at", [1, 3, 9, 20])
def test_ctrl_c_waits_for_the_end_of_a_pass_and_changes_no_text(at: int, led: LeadingTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that one process leaves would pair its sums with those of another."""
    sampling, calls, right = Sampling(temperature=0, max_tokens=12, ignore_eos=True), [0], shares.Ranks.sum
    with Engine(led, load=TWO) as engine:
        want = engine.generate([5, 6, 7], sampling).token_ids

        def sum(self: shares.Ranks, part: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == at:
                signal.raise_signal(signal.SIGINT)
            return right(self, part)

        monkeypatch.setattr(shares.Ranks, "sum", sum)
        request, interrupted = engine.submit([5, 6, 7], sampling)[0], 0
        while not request.done:
            try:
                engine.step()
            except KeyboardInterrupt:
                interrupted += 1
    assert interrupted == 1 and request.completion().token_ids == want
    led.check()


def test_a_pass_that_fails_in_between_ends_the_target_and_says_so(tiny_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(tiny_pair[0], LoadConfig(tensor_parallel=2, dtype="float32", self_test=False))
    assert isinstance(target, LeadingTarget)
    calls, right, began = [0], shares.Ranks.sum, time.monotonic()

    def sum(self: shares.Ranks, part: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 7:
            raise RuntimeError("no memory")
        return right(self, part)

    monkeypatch.setattr(shares.Ranks, "sum", sum)
    with Engine(target) as engine:
        requests = engine.submit([5, 6, 7], Sampling(temperature=0, max_tokens=12, ignore_eos=True, n=2))
        while not all(request.done for request in requests):
            engine.step()
        for request in requests:
            assert request.completion().finish_reason == "error"
        assert any("broken off (no memory)" in str(request.error) for request in requests)
        with pytest.raises(Failure, match="broken off .no memory.*load the target again"):
            engine.generate([5, 6, 7], max_tokens=2)
    assert all(process.poll() is not None for process in target._followers.processes) and time.monotonic() - began < 9
    target.check()


def test_a_process_that_dies_is_named(tiny_pair: Pair) -> None:
    target = load_target(tiny_pair[0], LoadConfig(tensor_parallel=2, self_test=False))
    assert isinstance(target, LeadingTarget)
    process = target._followers.processes[0]
    os.kill(process.pid, signal.SIGKILL)
    process.wait(20)
    with pytest.raises(Failure, match="process 1 of the target has ended"):
        for _ in range(100):  # what lies in the line is lost, too
            target.open([1, 2, 3])
            time.sleep(0.01)


def test_followers_end_with_their_leader(tiny_pair: Pair) -> None:
    target = load_target(tiny_pair[0], LoadConfig(tensor_parallel=2, self_test=False))
    assert isinstance(target, LeadingTarget)
    processes, folder = target._followers.processes, Path(target._followers._folder)
    assert folder.exists()
    del target
    assert [process.wait(20) for process in processes] == [0] and not folder.exists()

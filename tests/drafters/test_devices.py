"""The engine on a device that is not the CPU, and a draft model on a device of its own. The device is pretended
(tests/models/elsewhere.py): what reaches the wrong one fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elsewhere import NAME, elsewhere

from draftproof import Engine, LoadConfig, LoadError, Sampling
from draftproof.models.load import builtin, load_target

Pair = tuple[Path, Path]
LOAD = {"dtype": "float32", "page_tokens": 64, "self_test": False}


@pytest.mark.parametrize(("device", "draft_device"), [("cpu", NAME), (NAME, "cpu")])
@pytest.mark.parametrize(("rule", "tree"), [("match", None), ("match", 8), ("ratio", 8), ("block", None)])
def test_guesses_cross_devices(device: str, draft_device: str, rule: str, tree: int | None, tiny_pair: Pair) -> None:
    load = LoadConfig(device=device, draft_device=draft_device, threads=torch.get_num_threads(), **LOAD)  # type: ignore[arg-type]
    sampling = Sampling(temperature=0.8, max_tokens=12, seed=3, ignore_eos=True)
    texts = []
    with elsewhere():
        target = load_target(tiny_pair[0], load)
        for spec in ("none", f"model:{tiny_pair[1]}"):
            options = {} if spec == "none" else {"tree": tree, "rule": rule}
            with Engine(target, spec, 0 if spec == "none" else 3, load=load, **options) as engine:  # type: ignore[arg-type]
                done = engine.generate([5, 9, 5, 9, 5], sampling)
                texts.append(done.token_ids)
                assert spec == "none" or (done.speculation["state"], done.metrics["drafted"] > 0) == ("on", True), done.speculation
                lm = getattr(engine.speculation.drafter, "lm", None)
                assert lm is None or lm.device.type == draft_device
    assert target.device.type == device and len(texts[1]) == 12
    assert rule != "match" or texts[0] == texts[1]


@pytest.mark.parametrize("tree", [None, 8])
def test_every_drafter_runs_where_the_target_is(tree: int | None) -> None:
    load = LoadConfig(device=NAME, dtype="float32", self_test=False, threads=torch.get_num_threads())
    sampling = Sampling(temperature=0.8, max_tokens=5, seed=3, ignore_eos=True)
    texts = {}
    with elsewhere():  # whose tensors cannot do what dflash does: view parameters in inference mode
        target = load_target(builtin("target"), load)
        for spec in ("none", "ngram", "suffix", "model", "pard", "layer-skip:exit=2", "eagle3", "mtp", "medusa", "mlp"):
            options = {"depth": 0} if spec == "none" else {"depth": 3, "tree": tree}
            with Engine(target, spec, load=load, **options) as engine:  # type: ignore[arg-type]
                done = engine.generate("def fib(n):\n    return fib(n - 1) + fib(", sampling)
            texts[spec] = done.token_ids
            assert spec == "none" or done.speculation["state"] == "on" and done.metrics["drafted"] > 0, done.speculation
    assert all(text == texts["none"] for text in texts.values()), texts


def test_greedy_texts_and_options_cross_devices(tiny_pair: Pair) -> None:
    load = LoadConfig(device=NAME, draft_device="cpu", threads=torch.get_num_threads(), **LOAD)  # type: ignore[arg-type]
    with elsewhere():
        target = load_target(tiny_pair[0], load)
        for more in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.2, "logit_bias": {7: 2.0}}):
            sampling, texts = Sampling(max_tokens=10, seed=4, ignore_eos=True, logprobs=2, **more), []  # type: ignore[arg-type]
            for spec in ("none", f"model:{tiny_pair[1]}"):
                with Engine(target, spec, 0 if spec == "none" else 3, load=load) as engine:
                    done = engine.generate_batch([[5, 9, 5], [8] * 70], sampling)
                    assert all(one.speculation["state"] == ("none" if spec == "none" else "on") for one in done), done[0].speculation
                    texts.append([one.token_ids for one in done])
            assert texts[0] == texts[1]


def test_the_draft_model_goes_where_it_is_sent(tiny_pair: Pair) -> None:
    texts = []
    for draft_device in (None, "cpu"):
        load = LoadConfig(device="cpu", draft_device=draft_device, **LOAD)  # type: ignore[arg-type]
        with Engine(str(tiny_pair[0]), f"model:{tiny_pair[1]}", 3, load=load) as engine:
            texts.append(engine.generate([5, 9, 5], Sampling(temperature=0.7, max_tokens=20, seed=1)).token_ids)
    assert texts[0] == texts[1]
    made = LoadConfig(device="cuda", draft_device="cuda:1", self_test=True).of_draft()
    assert (made.device, made.self_test) == ("cuda:1", False) and LoadConfig(device="cuda").of_draft().device == "cuda"
    eight = LoadConfig(device="cuda", quantization="fp8")
    assert eight.of_draft().quantization == "fp8", "where the target is"
    apart = LoadConfig(device="cuda", quantization="fp8", draft_device="cpu")
    assert apart.of_draft().quantization is None, "no CPU multiplies such numbers"


@pytest.mark.parametrize(("name", "said"), [("cuda:99", "CUDA device"), ("no-such-device", "expected cpu, cuda or cuda:N")])
def test_a_device_that_is_not_there_is_refused(name: str, said: str, tiny_pair: Pair) -> None:
    for load in (LoadConfig(device=name, self_test=False), LoadConfig(draft_device=name, self_test=False)):
        with pytest.raises(LoadError, match=f"device='{name}'.*{said}"):
            Engine(str(tiny_pair[0]), f"model:{tiny_pair[1]}", 3, load=load)

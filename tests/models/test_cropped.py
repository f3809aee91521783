"""Models that keep their own cache: passes that fail between two of their layers leave texts as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from engine.engine_support import foresight, to_the_end
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer

from draftproof import Engine, Sampling
from draftproof.config import LoadConfig
from draftproof.drafters.fixed import Oracle
from draftproof.errors import CacheFull
from draftproof.models import cropped
from draftproof.models.cropped import CroppedTarget
from draftproof.models.load import load_target

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]
ASKED = Sampling(temperature=0, max_tokens=20, ignore_eos=True)
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 96, "conv_L_cache": 3}


@pytest.fixture(scope="module", params=["xglm", "bloom", "lfm2"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CroppedTarget:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "lfm2":  # of short convolutions, whose states have no length
        torch.manual_seed(0)
        config = AutoConfig.for_model("lfm2", **{**families.COMMON, **CONVOLUTIONS})
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(folder)
    else:
        families.save(request.param, folder)
    found = load_target(folder, LoadConfig(self_test=False), fused=False)
    assert isinstance(found, CroppedTarget) and found.facts.tier == 2
    return found


@pytest.fixture(scope="module")
def plain(target: CroppedTarget) -> list[tuple[int, ...]]:
    with Engine(target) as engine:
        return [engine.generate(prompt, ASKED).token_ids for prompt in PROMPTS]


@pytest.fixture
def hooks() -> Iterator[list[Any]]:
    found: list[Any] = []
    yield found
    for hook in found:
        hook.remove()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("drafter", ["none", "ngram:min=1,max=2"])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 8, 13])
def test_a_pass_that_fails_once(target: CroppedTarget, plain: list[tuple[int, ...]], at: int, drafter: str, error: type[BaseException],
                                hooks: list[Any]) -> None:
    """Of two prompts the first or the second one, and of rounds an early one and later ones."""
    passes: list[int] = []

    def fail(*about: Any) -> None:
        passes.append(1)
        if len(passes) == at:
            raise error("no memory, once")

    hooks.append(target.parts.layers[1].register_forward_pre_hook(fail))
    with Engine(target, drafter, "auto" if drafter == "none" else 3) as engine:
        handles = [engine.submit(prompt, ASKED)[0] for prompt in PROMPTS]
        interrupted = to_the_end(engine, handles)
        assert len(passes) > at and interrupted == (error is KeyboardInterrupt)
        for handle, want in zip(handles, plain, strict=True):
            assert (handle.completion().finish_reason, handle.completion().token_ids) == ("length", want), handle.error
    assert not target.slots


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_between_keys_and_values(target: CroppedTarget, plain: list[tuple[int, ...]], error: type[BaseException],
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that have keys but not their values, also in a pass that rebuilds a cache."""
    right, calls = DynamicLayer.update, []

    def update(self: DynamicLayer, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) in (8, 10, 20):
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
            self.keys = torch.cat([self.keys, keys], -2)
            raise error("stopped")
        return right(self, keys, values, *more, **named)

    monkeypatch.setattr(DynamicLayer, "update", update)
    monkeypatch.setattr(cropped, "CHUNK", 4)
    with Engine(target) as engine:
        handle = engine.submit(PROMPTS[0], ASKED)[0]
        interrupted = to_the_end(engine, [handle])
        found = handle.completion()
    if error is KeyboardInterrupt:
        assert interrupted == 3 and (found.finish_reason, found.token_ids) == ("length", plain[0])
    else:
        assert found.token_ids == plain[0][: len(found.token_ids)]
    assert not target.slots


def test_a_failed_pass_keeps_every_key_that_it_can(tmp_path: Path, hooks: list[Any]) -> None:
    """Nothing is read again where layers can be cut, so that the text's keys keep their bits."""
    families.save("xglm", tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False), fused=False)
    assert isinstance(target, CroppedTarget)
    slot, rows = target.open([]), torch.tensor(PROMPTS[0])
    target.extend([slot], [rows])
    kept = [layer.keys.clone() for layer in slot.cache.layers]
    hooks.append(target.parts.layers[2].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("once"))))
    with pytest.raises(RuntimeError, match="once"):
        target.extend([slot], [rows])
    assert slot.length == len(rows) and all(torch.equal(layer.keys, keys) for layer, keys in zip(slot.cache.layers, kept, strict=True))


CHUNKS = {"layer_types": ["chunked_attention", "full_attention", "chunked_attention"], "attention_chunk_size": 16, "head_dim": 16,
          "intermediate_size_mlp": 96, "moe_layers": []}


@pytest.mark.parametrize("before", [5, 40])
@pytest.mark.parametrize(("family", "options"), [("lfm2", CONVOLUTIONS), ("llama4_text", CHUNKS)])
def test_a_cut_behind_what_the_cache_kept(family: str, options: dict[str, Any], before: int, tmp_path: Path) -> None:
    """As a draft model's slot is cut: by several tokens that came singly. And again, by more."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**families.COMMON, **options}), dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    target = load_target(tmp_path, LoadConfig(self_test=False), fused=False)
    text = torch.randint(1, 200, (60,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        want = model(input_ids=text[None], use_cache=False).logits[0]
    slot = target.open([], room=100)
    target.extend([slot], [text[:before]])
    for length in (before, before - 3):
        for guess in ((text[length : length + 3] + 1) % 200).split(1):
            target.extend([slot], [guess])
        target.truncate(slot, length)
        torch.testing.assert_close(target.extend([slot], [text[length : length + 1]]).logits[0], want[length], rtol=1e-3, atol=1e-4)
        target.truncate(slot, length)


@pytest.mark.parametrize("family", ["xglm", "rwkv"])
def test_texts_wait_until_the_cache_has_room_for_all_they_may_become(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = families.FAMILIES.get(family, {"attention_hidden_size": 64})
    config = AutoConfig.for_model(family, **{**families.COMMON, **options})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(tmp_path)
    target: Any = load_target(tmp_path, LoadConfig(self_test=False, cache_tokens=60), fused=False)
    most = 0
    with Engine(target) as engine:
        handles = [engine.submit([1, 2, 3, 4, 5 + i], ASKED)[0] for i in range(4)]
        while not all(handle.done for handle in handles):
            engine.step()
            most = max(most, sum(slot.length for slot in target.slots))
        assert [len(handle.completion().token_ids) for handle in handles] == [20] * 4
    assert 30 < most <= 60
    target.open([1] * 10, room=45)
    with pytest.raises(CacheFull, match="55 of 60"):
        target.open([1, 2], room=4)
    assert len(target.slots) == 1


@pytest.mark.parametrize("family", ["xglm", "bloom"])
def test_what_the_load_says_of_bits_holds_where_few_rows_show_that_it_does_not(family: str, tmp_path: Path) -> None:
    """Rounded activations hide for many rows that attention adds in another order."""
    families.save(family, tmp_path)
    target, prompt = load_target(tmp_path, LoadConfig(quantization="int4", page_tokens=64), fused=False), [1, 2, 3, 4, 5, 6, 7]
    asked = Sampling(temperature=0, max_tokens=240, ignore_eos=True, logprobs=0)
    with Engine(target) as engine:
        plain = engine.generate(prompt, asked)
    with Engine(target, Oracle(foresight([[*prompt, *plain.token_ids]]), wrong_at=lambda at: at % 5 == 0), 6) as engine:
        found = engine.generate(prompt, asked)
    assert found.logprobs == plain.logprobs or not target.facts.invisible, target.facts.invisible_reason

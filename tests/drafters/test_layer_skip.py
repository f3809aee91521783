"""`layer-skip`: the text is plain decoding's bit for bit, no page of another's is touched, and the whole model is always right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from draftproof import Engine, EngineConfig, LoadConfig, OptionError, Sampling, SpecError
from draftproof.drafters import build, parse_spec
from draftproof.drafters.layer_skip import LayerSkipDrafter
from draftproof.models.fake import TableTarget
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget
from draftproof.models.shallow import Shallow

LAYERS, PAGE, V = 4, 16, 96
LOAD = LoadConfig(device="cpu", page_tokens=PAGE, prefill_chunk=8, cache_tokens=4096, self_test=False)
SHAPE = dict(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
             max_position_embeddings=160, initializer_range=0.2, bos_token_id=0, eos_token_id=None)
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=12)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)),
}


def save(folder: Path, family: str = "llama") -> Path:
    torch.manual_seed(0)
    FAMILIES[family]().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path) -> PagedTarget:
    found = load_target(folder, LOAD)
    assert isinstance(found, PagedTarget)
    return found


def prompts() -> list[list[int]]:
    """Two share two pages; one ends just before a page edge, one on it; all cross edges while they grow."""
    common = [(7 * i) % V for i in range(2 * PAGE)]
    return [common + [3, 4, 5], common + [9] * 6, [11] * (PAGE - 1), [(5 * i + 1) % V for i in range(PAGE)]]


def texts(target: PagedTarget, drafter: Any, batch: int, temperature: float, tree: int | None = None, rule: str = "match",
          depth: int = 4) -> Iterator[Any]:
    with Engine(target, drafter, depth if drafter != "none" else "auto", tree=tree, rule=rule,     # type: ignore[arg-type]
                config=EngineConfig(max_batch=batch)) as engine:
        handles = [engine.submit(p, Sampling(temperature=temperature, top_p=0.95, seed=i, max_tokens=40 - 3 * i))[0]
                   for i, p in enumerate(prompts())]
        while not all(handle.done for handle in handles):
            engine.step()
        assert not engine.speculation.failure
        yield from (handle.completion() for handle in handles)
    target.check()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_invisible_to_the_bit(target: PagedTarget, temperature: float) -> None:
    plain = [done.token_ids for done in texts(target, "none", 1, temperature)]
    for exit, batch, tree in ((1, 4, 9), (2, 1, None), (LAYERS, 4, None)):
        done = list(texts(target, f"layer-skip:exit={exit}", batch, temperature, tree))
        assert [d.token_ids for d in done] == plain, (exit, batch, tree)
        assert sum(d.metrics["drafted"] for d in done) > 80


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_layers_accept_everything(family: str, temperature: float, tmp_path: Path) -> None:
    """Only if the pass of the first layers is the model's own: embedding scale, windows, soft caps, final norm, output."""
    whole = load_target(save(tmp_path, family), LOAD)
    assert isinstance(whole, PagedTarget)
    for done in texts(whole, f"layer-skip:exit={LAYERS}", 3, temperature):
        fates = [n.fate for e in done.trace if e.event == "round_done" for n in e.nodes]
        assert fates and set(fates) == {"accepted"}


def test_without_the_slim_forward_it_is_the_same(folder: Path) -> None:
    stock = load_target(folder, LOAD, fused=False)
    assert isinstance(stock, PagedTarget)
    for done in texts(stock, f"layer-skip:exit={LAYERS}", 4, 0.0):
        assert done.metrics["draft_utilisation"] == 1.0
    assert len(stock.parts.layers) == LAYERS == len(stock.model.model.layers)          # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("exit", [1, 3])
def test_the_first_layers_are_the_model_cut_off(folder: Path, exit: int) -> None:
    """Against transformers: the same checkpoint with so many layers, float32."""
    load = LoadConfig(device="cpu", dtype="float32", page_tokens=PAGE, self_test=False)
    cut = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, num_hidden_layers=exit)
    ids = torch.tensor([(3 * i + 2) % V for i in range(PAGE + 7)])
    target = load_target(folder, load)
    assert isinstance(target, PagedTarget)
    slot, lm = target.open(ids.tolist()), Shallow(target, exit)
    target.extend([slot], [ids[:-5]])
    place = lm.join(slot)
    for chunk in (ids[-5:-4], ids[-4:-1], ids[-1:]):
        got = lm.extend([place], [chunk]).logits
    with torch.no_grad():
        assert torch.allclose(got, cut(ids[None]).logits[0, -1:], atol=1e-5)
    assert place.length == len(ids) and slot.length == len(ids) - 5, "the text is as long as before"
    lm.truncate(place, len(ids) - 2)
    assert torch.allclose(lm.extend([place], [ids[-2:]]).logits, got, atol=1e-5)


def test_shared_pages_are_never_written(target: PagedTarget) -> None:
    common = prompts()[0]
    with Engine(target, "layer-skip:exit=2", 6) as engine:
        engine.generate(common, Sampling(temperature=0.0, max_tokens=4))
        shared = [page for page in target.pool.prefix_of]
        held = {(layer, page): store[page * PAGE:(page + 1) * PAGE].clone() for page in shared
                for layer, store in target.pool.keys.items()}
        for temperature in (0.0, 1.0):
            done = engine.generate(common, Sampling(temperature=temperature, top_p=1.0, seed=2, max_tokens=30))
            assert next(e for e in done.trace if e.event == "request_started").cached_tokens == 2 * PAGE
    for (layer, page), keys in held.items():
        assert torch.equal(target.pool.keys[layer][page * PAGE:(page + 1) * PAGE], keys)
    assert len(shared) >= 2


def test_the_law_is_kept_by_the_joint_rules_too(target: PagedTarget) -> None:
    """The whole model under `ratio`: p = q, so that everything stands; a shallow one is judged by the law it gives."""
    for done in texts(target, f"layer-skip:exit={LAYERS}", 1, 0.8, rule="ratio"):
        assert done.metrics["draft_utilisation"] == 1.0
    for done in texts(target, "layer-skip:exit=1", 4, 0.8, rule="ratio"):
        assert done.metrics["drafted"] > done.metrics["accepted"]


def test_a_switch_in_the_middle_of_a_text_leaves_nothing_behind(target: PagedTarget) -> None:
    plain = [done.token_ids for done in texts(target, "none", 1, 0.0)]
    with Engine(target, "layer-skip:exit=1", 5) as engine:
        handles = [engine.submit(p, Sampling(temperature=0.0, max_tokens=40 - 3 * i))[0] for i, p in enumerate(prompts())]
        for step in range(1000):
            if all(handle.done for handle in handles):
                break
            engine.set_speculation(enabled=step % 3 != 2)
            engine.step()
        assert [handle.completion().token_ids for handle in handles] == plain
    target.check()


def test_what_the_checkpoint_says_is_the_default(folder: Path, target: PagedTarget) -> None:
    with pytest.raises(OptionError, match="expected layer-skip:exit=E with 1 ≤ E ≤ 4"):
        build("layer-skip", target, "match", LOAD)
    told = load_target(folder, LOAD)
    told.model.generation_config.assistant_early_exit = 2               # type: ignore[attr-defined]
    drafter = build("layer-skip", told, "match", LOAD)
    assert isinstance(drafter, LayerSkipDrafter) and drafter.layers.exit == 2
    assert drafter.weight_bytes == 0 and "first 2 of 4 layers" in drafter.lm.facts.name


def test_refusals_say_why(target: PagedTarget) -> None:
    with pytest.raises(OptionError, match="exit=5, but .* has 4 layers; expected an integer from 1 to 4"):
        build("layer-skip:exit=5", target, "match", LOAD)
    with pytest.raises(OptionError, match="tier 1 in one process, whose pages it shares; table-8 is of tier 0"):
        build("layer-skip:exit=1", TableTarget(8), "match", LOAD)
    with pytest.raises(SpecError, match="exit='0'"):
        parse_spec("layer-skip:exit=0")

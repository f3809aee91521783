"""Loading: what is refused and how, what is reported, packed weights, taps, and the self-test (that it can fail, too)."""

from __future__ import annotations

import json
from pathlib import Path

import families
import pytest
import torch

from draftproof.config import LoadConfig
from draftproof.errors import CacheFull, LoadError
from draftproof.models import selftest
from draftproof.models.heads.detect import detect
from draftproof.models.heads.files import read_files
from draftproof.models.load import as_target, builtin, load_target
from draftproof.models.packed import PackedLinear, can_pack, has_half_products, scale_to_halves
from draftproof.models.paged import PagedTarget
from draftproof.types import Draft, Scores

SMALL = LoadConfig(page_tokens=64, self_test=False)


def test_refusals_say_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="does not exist"):
        load_target(tmp_path / "nowhere" / "model")
    with pytest.raises(LoadError, match="no config.json"):
        load_target(tmp_path)
    families.save("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match=r"pytorch_model.bin.*never read"):
        load_target(tmp_path)
    with pytest.raises(LoadError, match="built-in model 'nothing'"):
        builtin("nothing")


def test_an_assistant_over_the_targets_keys_is_refused_by_name(tmp_path: Path) -> None:
    """Gemma 4's: a causal language model by its class's name, which reads the target's keys and hidden states. It is a drafter."""
    config = {"model_type": "gemma4_assistant", "architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": 32,
              "text_config": {"model_type": "gemma4_text", "hidden_size": 32, "hidden_size_per_layer_input": 0, "num_hidden_layers": 4,
                              "num_kv_shared_layers": 4, "vocab_size_per_layer_input": 0, "vocab_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    from safetensors.torch import save_file

    save_file({"pre_projection.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="gemma4_assistant.*its target.*--drafter assistant:PATH"):
        load_target(tmp_path)
    assert detect(read_files(tmp_path)) == "assistant"


def test_an_encoder_decoder_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(LoadError, match="encoder–decoder"):
        load_target(tmp_path)


def test_broken_and_incomplete_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    families.save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match="up_proj"):
        load_target(tmp_path, SMALL)
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(LoadError, match="could not be loaded"):
        load_target(tmp_path, SMALL)


def test_facts_carry_reasons(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    facts = load_target(tmp_path, SMALL).facts
    assert {"device", "dtype", "threads", "tier", "linear layers", "tokenizer"} <= set(facts.reasons)
    assert facts.tier == 1 and facts.dtype == "float32" and facts.cache_bytes_per_token == 2 * 3 * 2 * 16 * 4
    assert facts.weight_bytes == 4 * facts.parameters > 0
    assert not facts.invisible and "self-test is off" in facts.invisible_reason
    asked = load_target(tmp_path, LoadConfig(page_tokens=64, self_test=False, dtype="bfloat16")).facts
    assert asked.dtype == "bfloat16" and "as asked" in asked.reasons["dtype"]


@pytest.mark.parametrize(("saved", "quick", "chosen"), [
    ("bfloat16", True, "bfloat16"), ("bfloat16", False, "float32"), ("float16", True, "bfloat16"), ("float16", False, "float32"),
    ("float32", False, "float32")])
def test_half_precision_is_computed_in_what_the_processor_has_instructions_for(
        saved: str, quick: bool, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": saved}))
    monkeypatch.setattr("draftproof.models.load.multiplies_bfloat16", lambda: quick)
    target = load_target(tmp_path, LoadConfig(self_test=False, packed=False))
    assert (target.facts.dtype, target.parts.saved_as) == (chosen, getattr(torch, saved))
    assert ("no instructions" in target.facts.reasons["dtype"]) == (not quick and saved != "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", [(4, 4), (28, 4), (6, 3)])
def test_invisible_to_the_bit_with_1_7_and_2_queries_per_key_head(heads: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    if not can_pack(getattr(torch, dtype))[0]:
        pytest.skip(can_pack(getattr(torch, dtype))[1])
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(heads[0])
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=16 * heads[0],
            num_hidden_layers=2,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=16,
            intermediate_size=128,
            max_position_embeddings=512,
        )
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    facts = load_target(tmp_path, LoadConfig(page_tokens=64)).facts
    assert facts.invisible, facts.invisible_reason


@pytest.mark.parametrize("page_tokens", [2, 5, 13])
def test_pages_smaller_than_the_rows_that_straddle_an_edge_are_measured_too(page_tokens: int, tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    facts = load_target(tmp_path, LoadConfig(page_tokens=page_tokens)).facts
    assert facts.invisible, facts.invisible_reason


def test_the_self_test_finds_a_planted_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.save("llama", tmp_path)
    target = load_target(tmp_path, SMALL)
    assert selftest.invisible(target, 64, 128)[0]
    stock = PagedTarget.score

    def leaky(self: PagedTarget, slots: object, roots: torch.Tensor, drafts: list[Draft]) -> object:
        scores = stock(self, slots, roots, drafts)  # type: ignore[arg-type]
        if scores.logits.shape[0] >= 8:  # as a kernel that changes at eight rows would
            logits = scores.logits.clone()
            logits[0, 0] += logits[0, 0].abs() * 2**-20
            return Scores(logits, scores.starts)
        return scores

    monkeypatch.setattr(PagedTarget, "score", leaky)
    passed, reason = selftest.invisible(target, 64, 128)
    assert not passed and "8 wide" in reason


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_products_of_bfloat16_are_rounded_once_without_its_instructions(bias: bool, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not can_pack(torch.float32)[0]:
        pytest.skip(can_pack(torch.float32)[1])
    monkeypatch.setattr("draftproof.models.packed.multiplies_bfloat16", lambda: False)
    monkeypatch.setattr("draftproof.models.packed.has_half_products", lambda: halves and has_half_products())
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 80, bias=bias).to(torch.bfloat16)
    packed, x = PackedLinear(layer.weight, layer.bias), torch.randn(5, 48, dtype=torch.bfloat16)
    with torch.inference_mode():
        exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        got = packed(x)
    assert got.dtype == torch.bfloat16 and packed.weight_bytes == (4 if packed.scale is None else 2) * 48 * 80
    assert (packed.scale is not None) == (halves and has_half_products())
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all(), "half a unit of bfloat16's last place, and float32's noise"


@pytest.mark.parametrize(("size", "factor"), [((48, 80), 1.0), ((80, 48), 2.0**-30), ((256, 1000), 2.0**12)])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_that_are_halves_are_read_as_such_and_multiply_the_same(size: tuple[int, int], factor: float, bias: bool) -> None:
    if not has_half_products():
        pytest.skip("this torch has no FBGEMM")
    torch.manual_seed(1)
    layer = torch.nn.Linear(*size, bias=bias)
    layer.weight.data = (layer.weight.data.bfloat16() * factor).float()
    packed, x = PackedLinear(layer.weight, layer.bias), torch.randn(3, 7, size[0])
    assert packed.scale is not None and packed.weight_bytes == 2 * size[0] * size[1]
    with torch.inference_mode():
        exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        got = packed(x)
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=2e-6 * factor)
        rows, wide = x.view(21, -1), got.view(21, -1)
        for count in (1, 2, 3, 5, 8, 13):
            for start in range(0, 21 - count, count):
                assert torch.equal(packed(rows[start:start + count]), wide[start:start + count]), f"{count} rows from {start}"


def test_weights_that_are_not_halves_stay_what_they_are() -> None:
    sixteen = torch.tensor([[1.0, -2.0**-20], [0.0, 3.0]])
    assert scale_to_halves(sixteen) == 2.0**13
    assert scale_to_halves(torch.zeros(2, 2)) is not None and scale_to_halves(torch.zeros(0, 2)) is not None
    for value in (1 + 2.0**-20, 2.0**-40, float("inf"), float("nan")):
        assert scale_to_halves(torch.cat([sixteen, torch.tensor([[1.0, value]])])) is None, value
    torch.manual_seed(0)
    packed = PackedLinear(torch.randn(8, 8), None)
    assert packed.scale is None and packed.weight_bytes == 4 * 64


def test_packed_linear_is_the_linear_layer() -> None:
    able, why = can_pack(torch.float32)
    if not able:
        pytest.skip(why)
    torch.manual_seed(0)
    layer = torch.nn.Linear(48, 80)
    packed, x = PackedLinear(layer.weight, layer.bias), torch.randn(5, 48)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), layer(x))
        wide = packed(x)
        assert all(torch.equal(packed(x[i : i + 2])[0], wide[i]) for i in range(4))


def test_taps_are_the_layers_outputs(tmp_path: Path) -> None:
    model = families.save("llama", tmp_path)
    target = load_target(tmp_path, SMALL)
    assert isinstance(target, PagedTarget)
    target.set_taps([0, 2])
    text = torch.arange(3, 15)
    slot = target.open(text.tolist(), room=20)
    taps = target.extend([slot], [text]).taps
    hidden = model(text[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(taps[0], hidden[1][0], atol=1e-4, rtol=1e-4)
    assert set(taps) == {0, 2} and taps[2].shape == (12, 64)
    scores = target.score([slot], torch.tensor([7]), [Draft.chain([1, 2])])
    assert scores.taps[0].shape == (3, 64)
    target.set_taps([])
    target.rewind(slot, ())
    assert target.score([slot], torch.tensor([7]), [Draft.empty()]).taps == {}


def test_a_pass_that_fails_leaves_the_slots_as_they_were(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    target = load_target(tmp_path, LoadConfig(page_tokens=16, cache_tokens=64, self_test=False))
    assert isinstance(target, PagedTarget)
    slot = target.open([1] * 20, room=10)
    target.extend([slot], [torch.ones(20, dtype=torch.int64)])
    tree = Draft(torch.arange(12), (-1,) * 12)  # twelve paths need eleven pages more than there are
    with pytest.raises(CacheFull):
        target.score([slot], torch.tensor([3]), [tree])
    target.check()
    assert slot.length == 20
    target.score([slot], torch.tensor([3]), [Draft.chain([4])])
    target.rewind(slot, (0,))
    assert slot.tokens[-2:] == [3, 4]
    target.truncate(slot, 5)
    target.check()
    target.close(slot)
    target.check()


def test_truncate_into_a_shared_page_copies_it(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    target = load_target(tmp_path, LoadConfig(page_tokens=16, self_test=False))
    assert isinstance(target, PagedTarget)
    text = torch.arange(1, 41)
    first = target.open(text.tolist(), room=30)
    target.extend([first], [text])
    second = target.open(text.tolist(), room=30)
    assert second.length == 32 and second.pages[:2] == first.pages[:2]
    target.truncate(second, 20)
    target.extend([second], [torch.full((12,), 9)])  # overwrites what would have been the shared page
    target.truncate(second, 20)
    a = target.score([first], torch.tensor([5]), [Draft.chain([6])]).logits
    target.rewind(first, ())
    target.extend([second], [text[20:]])
    b = target.score([second], torch.tensor([5]), [Draft.chain([6])]).logits
    assert torch.equal(a, b)
    target.rewind(second, ())
    target.close(first)
    target.close(second)
    target.check()


def test_truncate_into_a_shared_page_of_a_full_pool_changes_nothing(tmp_path: Path) -> None:
    families.save("llama", tmp_path)
    target = load_target(tmp_path, LoadConfig(page_tokens=4, cache_tokens=12, self_test=False))
    assert isinstance(target, PagedTarget)
    slot = target.open([0, 1], room=6)
    target.extend([slot], [torch.arange(8)])
    reader = target.open([*range(8), 9])  # of both pages, and the last one is its own
    with pytest.raises(CacheFull):
        target.truncate(slot, 2)
    assert slot.length == 4
    target.check()
    target.close(reader)
    target.truncate(slot, 2)
    target.extend([slot], [torch.tensor([7])])
    assert slot.tokens == [0, 1, 7]
    target.check()


def test_truncate_into_a_page_that_nobody_else_reads_takes_none(tmp_path: Path) -> None:
    """Where none is left: the page is its own again, and no later text finds it. Else it goes on in what it had room for."""
    families.save("llama", tmp_path)
    target = load_target(tmp_path, LoadConfig(page_tokens=4, cache_tokens=8, self_test=False))
    assert isinstance(target, PagedTarget)
    for room, length in ((6, 6), (6, 2), (2, 2)):
        slot = target.open([0, 1], room=room)
        pages = list(slot.pages)
        target.extend([slot], [torch.arange(2 + room)])
        held = target.open([5], room=3) if room == 2 else None  # the last one
        target.truncate(slot, length)
        target.check()
        assert slot.pages == (pages if length == 6 or held else pages[1:]) and slot.shared == length // 4
        target.extend([slot], [torch.full((2,), 7)])
        assert slot.tokens == [*range(length), 7, 7]
        for each in filter(None, (slot, held)):
            target.close(each)
        target.check()
        target.pool = type(target.pool)(4, 8, target.device)


def test_a_model_in_memory_is_the_one_of_its_folder(tmp_path: Path) -> None:
    here = as_target(families.save("llama", tmp_path), name="here")
    there = load_target(tmp_path)
    prompt = [torch.tensor([3, 5, 7, 11])]
    logits = [target.extend([target.open([3, 5, 7, 11])], prompt).logits for target in (there, here)]
    assert torch.equal(*logits) and here.facts.name == "here" and here.facts.reasons["forward pass"] == there.facts.reasons["forward pass"]
    assert (here.facts.weight_bytes, here.facts.dtype, here.facts.invisible) == (there.facts.weight_bytes, there.facts.dtype, True)

"""Gemma 4's assistants: our network against transformers' own over the keys of a target, the round in an engine, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from elsewhere import NAME, elsewhere, waits_of_rounds
from torch import Tensor

from draftproof import Engine, LoadConfig, Sampling
from draftproof.core.tree import path
from draftproof.drafters.assistant import AssistantDrafter, gathered
from draftproof.drafters.base import Site
from draftproof.errors import DraftproofError, LoadError, OptionError
from draftproof.models.heads.assistant import Assistant, View
from draftproof.models.heads.detect import detect
from draftproof.models.heads.files import read_files
from draftproof.models.load import load_target
from draftproof.models.paged import PagedTarget

V, WIDTH, WINDOW, PAGE = 120, 48, 12, 8
ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}}
PLE = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}        # which Gemma 4 unified does not have
COMMON = {"vocab_size": V, "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 16,
          "global_head_dim": 32, "sliding_window": WINDOW, "max_position_embeddings": 256,
          "rope_parameters": ROPE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def random(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise / max(1, parameter.shape[-1]) ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.3 * torch.rand(buffer.shape, generator=generator))
            if name.endswith("token_ordering"):
                buffer.copy_(torch.randperm(buffer.shape[0], generator=generator))
    return model.eval()


def of(name: str, unified: bool = False) -> Any:
    return getattr(transformers, ("Gemma4Unified" if unified else "Gemma4") + name)


def target_of(folder: Path, shared: int = 0, unified: bool = False) -> Any:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    own = {} if unified else {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": V} if shared else PLE
    config = of("TextConfig", unified)(hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=6, layer_types=kinds,
                                       num_kv_shared_layers=shared, **COMMON, **own)
    model = random(of("ForCausalLM", unified)(config), 1)
    model.save_pretrained(folder)
    return model


def assistant_of(folder: Path, clusters: bool = False, unified: bool = False, **more: Any) -> Any:
    """transformers' window counts the keys before a query's own, which Gemma 4's own layers, and ours, count with it."""
    own = {} if unified else {**PLE, "use_double_wide_mlp": False}
    text = of("TextConfig", unified)(hidden_size=32, intermediate_size=40, num_hidden_layers=3, num_kv_shared_layers=3,
                                     layer_types=["sliding_attention", "sliding_attention", "full_attention"], **{**COMMON, **own, **more})
    config = of("AssistantConfig", unified)(text_config=text, backbone_hidden_size=WIDTH, use_ordered_embeddings=clusters,
                                            num_centroids=10, centroid_intermediate_top_k=3)
    model = random(of("AssistantForCausalLM", unified)(config), 2)
    model.save_pretrained(folder)
    model.config.get_text_config().sliding_window -= 1
    return model


def loaded(folder: Path) -> PagedTarget:
    target = load_target(folder, LoadConfig(self_test=False, page_tokens=PAGE, dtype="float32"))
    assert isinstance(target, PagedTarget), target.facts.reasons
    return target


def guesses(model: Any, assistant: Any, ids: list[int], depth: int) -> list[Tensor]:
    """transformers' logits along its own likeliest tokens; the last of `ids` is not read yet."""
    found = []
    with torch.no_grad():
        out = model(torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        hidden, token, at = out.hidden_states[-1][:, -1:], torch.tensor([ids[-1:]]), torch.tensor([[len(ids) - 2]])
        for _ in range(depth):
            said = assistant(inputs_embeds=torch.cat((model.get_input_embeddings()(token), hidden), -1), position_ids=at,
                             shared_kv_states=dict(out.shared_kv_states))
            found.append(said.logits[0, 0])
            token, hidden = said.logits.argmax(-1), said.last_hidden_state
    return found


TEXT = [int(t) for t in torch.randint(3, V, (41,), generator=torch.Generator().manual_seed(5))]


@pytest.mark.parametrize(("shared", "unified"), [(0, False), (2, False), (0, True)])
@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize("length", [4, 20, 41])
def test_the_network_says_what_transformers_says(shared: int, unified: bool, clusters: bool, length: int, tmp_path: Path) -> None:
    model, assistant = target_of(tmp_path / "target", shared, unified), assistant_of(tmp_path / "head", clusters, unified)
    files, target = read_files(tmp_path / "head"), loaded(tmp_path / "target")
    assert detect(files) == "assistant"
    head = Assistant.read(files, target.parts, V)
    assert head.layers == {"sliding_attention": (4 - shared, WINDOW), "full_attention": (5 - shared, None)}
    ids = TEXT[:length]
    target.set_taps(head.taps)
    slot = target.open(ids)
    rows = target.extend([slot], [torch.tensor(ids[:-1])]).taps[head.taps[0]]
    assert target.parts.norm is not None
    with torch.inference_mode():
        keys = {kind: gathered(target.pool, layer, [slot.pages], [length - 1], window) for kind, (layer, window) in head.layers.items()}
        view = View(keys, head.turns(torch.tensor([length - 2])))
        hidden, token = target.parts.norm(rows[-1:]), torch.tensor(ids[-1:])
        for expected in guesses(model, assistant, ids, 4):
            logits, hidden = head.step(hidden, token, view)
            told = logits[0].isfinite()
            assert int(told.sum()) == (36 if clusters else V)
            assert torch.allclose(logits[0][told], expected[told], atol=2e-4)
            token = logits.argmax(-1)


def test_texts_of_several_lengths_and_scattered_pages_are_read_as_each_alone(tmp_path: Path) -> None:
    target_of(tmp_path / "target")
    target = loaded(tmp_path / "target")
    slots = [target.open([]) for _ in range(3)]
    for token in TEXT[:30]:                                             # turn by turn, so that no text has consecutive pages
        target.extend(slots, [torch.tensor([token]), torch.tensor([token + 1]), torch.tensor([token])])
    target.extend(slots[1:2], [torch.tensor(TEXT[30:37])])
    tables, ends = [slot.pages for slot in slots], [30, 37, 9]
    for layer, window in ((4, WINDOW), (5, None)):
        together = gathered(target.pool, layer, tables, ends, window)
        for i in range(3):
            alone, count = gathered(target.pool, layer, tables[i:i + 1], ends[i:i + 1], window), min(ends[i], window or 99)
            assert alone.key.shape[2] == count and together.there is not None and int(together.there[i].sum()) == count
            assert torch.equal(together.key[i, :, :count], alone.key[0]) and torch.equal(together.value[i, :, :count], alone.value[0])


@pytest.mark.parametrize("clusters", [False, True])
@pytest.mark.parametrize(("tree", "depth"), [(None, 4), (10, 3), (None, "auto")])
def test_texts_are_those_without_it(clusters: bool, tree: int | None, depth: Any, tmp_path: Path) -> None:
    target_of(tmp_path / "target", 2)
    assistant_of(tmp_path / "head", clusters)
    options = [Sampling(temperature=t, seed=s, max_tokens=n, ignore_eos=True) for t, s, n in ((0.0, 1, 40), (0.8, 2, 25), (1.0, 3, 50))]
    texts = {}
    for drafter in (f"assistant:{tmp_path / 'head'}", "none"):
        target = loaded(tmp_path / "target")
        with Engine(target, drafter, depth if drafter != "none" else "auto", tree=tree if drafter != "none" else None) as engine:
            found = engine.generate_batch([TEXT[:9 + 7 * i] for i in range(3)], options)
            assert engine.speculation.state[0] in ("on", "none"), engine.speculation.failure
            texts[drafter] = [out.token_ids for out in found]
            drafted = sum(out.metrics["drafted"] for out in found)
            assert drafter == "none" or drafted > (0 if depth == "auto" else 60)
        target.check()
    assert len({str(found) for found in texts.values()}) == 1


@pytest.mark.parametrize("tree", [None, 8])
def test_a_chain_on_another_device_waits_for_nothing_but_the_verdict(tree: int | None, tmp_path: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is pretended (elsewhere.py): what reaches the wrong one fails. A tree is looked at once besides."""
    target_of(tmp_path / "target", 2)
    assistant_of(tmp_path / "head")
    texts, rounds = [], waits_of_rounds(monkeypatch)
    options = [Sampling(temperature=t, max_tokens=10, seed=3, ignore_eos=True) for t in (0.0, 0.8)]
    for device, spec, depth, nodes in (("cpu", "none", 0, None), (NAME, f"assistant:{tmp_path / 'head'}", 3, tree)):
        load = LoadConfig(device=device, dtype="float32", page_tokens=PAGE, self_test=False, threads=torch.get_num_threads())
        with elsewhere() if device == NAME else nullcontext():
            rounds.clear()
            with Engine(str(tmp_path / "target"), spec, depth, tree=nodes, load=load) as engine:
                done = engine.generate_batch([TEXT[:9], TEXT[:23]], options)
                texts.append([out.token_ids for out in done])
                assert spec == "none" or engine.speculation.state[0] == "on" and done[0].metrics["drafted"] > 20
    assert texts[0] == texts[1] and {*map(len, rounds)} <= ({1} if tree is None else {1, 2})


def test_guesses_in_an_engine_are_those_of_transformers(tmp_path: Path) -> None:
    """Chains, and every path of a tree, of several texts at once."""
    model, assistant = target_of(tmp_path / "target"), assistant_of(tmp_path / "head")
    target = loaded(tmp_path / "target")
    drafter = AssistantDrafter.from_spec(str(tmp_path / "head"), {}, Site(target, "match", LoadConfig()))
    for tree in (None, 9):
        with Engine(target, drafter, 3, tree=tree) as engine:
            seen: list[Any] = []
            propose = drafter.propose

            def noted(states: Any, budgets: Any, noise: Any, seen: list[Any] = seen, propose: Any = propose) -> Any:
                drafts = propose(states, budgets, noise)
                seen.extend((list(state.seq.tokens), draft) for state, draft in zip(states, drafts, strict=True) if len(draft))
                return drafts

            drafter.propose = noted  # type: ignore[method-assign]
            engine.generate_batch([TEXT[:6 + 9 * i] for i in range(3)], Sampling(temperature=0, max_tokens=6, ignore_eos=True))
        assert len(seen) > 6
        for ids, draft in seen[:8]:
            likeliest = [int(logits.argmax()) for logits in guesses(model, assistant, ids, 3)]
            paths = [[draft.tokens[n].item() for n in path(draft.parents, node)] for node in range(len(draft))]
            deepest = max(map(len, paths)) if tree is None else 1
            assert likeliest[:deepest] in paths
        drafter.propose = propose  # type: ignore[method-assign]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    target_of(tmp_path / "target")
    target, head = loaded(tmp_path / "target"), tmp_path / "head"

    def refused(why: str, kind: type[DraftproofError] = LoadError) -> None:
        with pytest.raises(kind, match=why):
            AssistantDrafter.from_spec(str(head), {}, Site(target, "match", LoadConfig()))

    assistant_of(head, global_head_dim=64)
    refused("full_attention with queries of 64, and the target has keys of 32")
    assistant_of(head, vocab_size=V + 8)
    refused("has 128 tokens, the target 120")
    assistant_of(head)
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"backbone_hidden_size": 64}))
    refused("a Gemma 4 of width 64; this target is a gemma4_text of width 48")
    (head / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match="--drafter assistant:PATH"):
        load_target(head)
    with pytest.raises(LoadError, match="head for drafter assistant"):
        Engine(target, f"mlp:{head}")
    with pytest.raises(OptionError, match="tier 1 in one process"):
        from draftproof.models.fake import TableTarget

        AssistantDrafter.from_spec(str(head), {}, Site(TableTarget(V), "match", LoadConfig()))

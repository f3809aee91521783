"""What a pass costs as texts, batches and vocabularies grow, what reproducible mode adds, and how far the engine is from the formula.

    python benchmarks/scale.py --work DIR --write docs/scale.md              # about 15 minutes on 2 idle cores
    python benchmarks/scale.py --contexts 1024,4096 --batches 1,4 --vocabularies 4096 --prompts 1 --repeats 3

Passes are those of a Llama of random weights (189 M without the vocabulary), as it would be loaded: neither weights nor keys change what a
pass costs, so texts of 32,768 tokens are set up without being read. Widths, and reproducible and fast mode, take turns; a ratio
is the median of the pairs, with a 95 % interval, of fewer than six pairs with their range.

The last table runs the inflated pair of engine.py, off and at several depths, and sets what it measured beside
`core.budget.speedup`: E / (γ c + v(γ)) with the E of that very run and c and v timed alone, which is the most that its guesses could give;
then, in milliseconds per round, where the difference went. Prints the tables and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from memory import Memory
from overhead import constant_overhead, scoring_pass
from pages import put
from pair import SHAPES, inflated, read_prompts
from provenance import provenance
from ratios import paired, shown
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftproof import Engine, Sampling
from draftproof.bench.profile import FREE, most_free, timed_pass
from draftproof.config import LoadConfig
from draftproof.core.budget import speedup
from draftproof.drafters.model import ModelDrafter
from draftproof.models.load import WEIGHTS, load_target
from draftproof.view import style

BODY: dict[str, Any] = dict(hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=8, intermediate_size=4096,
                            max_position_embeddings=1 << 17, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None)
WIDTHS = (1, 2, 3, 5, 9, 16)
CONTEXT, SMALL_VOCABULARY = 512, 4096
DEPTHS = (1, 2, 4, 6)
MODES = {"reproducible": True, "fast": False}
GOALS = {1024: 1.03, 32768: 1.08}                      # reproducible ÷ fast, one row

Times = dict[int, list[float]]                         # rows of each text → seconds, turn by turn


def random_model(vocabulary: int, work: Path) -> Path:
    """The folder of a model of random weights with this vocabulary; made once."""
    folder = work / f"random-{vocabulary}"
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **BODY)).to(torch.bfloat16).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: str | None, tokens: int, mode: str = "reproducible") -> Any:
    return load_target(folder, LoadConfig(dtype=dtype, device="cpu", cache_tokens=tokens + 1024, reproducible=MODES[mode], self_test=False))


@contextmanager
def standing(target: Any, context: int, batch: int) -> Iterator[list[Any]]:
    """Slots of `context` tokens whose keys nobody computed but the first: they are zeros, and cost what others cost."""
    slots = []
    with torch.inference_mode():
        try:
            for i in range(batch):
                text = [(7 * t + i) % target.vocab_size for t in range(context)]
                slots.append(target.open(text, f"scale {context} {batch} {i}", max(WIDTHS) + 1))
                target.extend([slots[-1]], [torch.tensor(text[:1])])
                slots[-1].tokens.extend(text[1:])
            yield slots
        finally:
            for slot in slots:
                slot.tokens.clear()                    # nothing of this is worth keeping for other texts
                target.close(slot)


def passes(targets: Mapping[str, Any], context: int, batch: int, repeats: int,
           between: Callable[[], Any] = lambda: None) -> dict[str, Times]:
    """Seconds per mode and width, all of them in turn, with `between` after every turn; the first turn warms up. Each mode has a target of
    its own, as it was loaded: which rows and tiles a mode takes is decided there."""
    text = [3] * (context + max(WIDTHS))
    found: dict[str, Times] = {mode: {rows: [] for rows in WIDTHS} for mode in targets}
    kinds = [(mode, rows) for rows in WIDTHS for mode in targets]
    rng = random.Random(0)
    with ExitStack() as stack:
        slots = {mode: stack.enter_context(standing(target, context, batch)) for mode, target in targets.items()}
        for turn in range(repeats + 1):
            rng.shuffle(kinds)
            for mode, rows in kinds:
                seconds = timed_pass(targets[mode], slots[mode], [text] * batch, context, rows)
                if turn:
                    found[mode][rows].append(seconds)
            between()
    return found


def passes_of(target: Any, context: int, batch: int, repeats: int) -> Times:
    return passes({"": target}, context, batch, repeats)[""]


def free(times: Times) -> int:
    return most_free(milliseconds(times))


def by_context(targets: Mapping[str, Any], contexts: Sequence[int], repeats: int, memory: Memory) -> list[dict[str, Any]]:
    """limit_ms: reading weights and keys once, as fast as the memory was read between the very passes."""
    rows, facts = [], targets["reproducible"].facts
    for context in contexts:
        reads: list[float] = []
        times = passes(targets, context, 1, repeats, lambda found=reads: found.append(memory.read()))
        moved = facts.weight_bytes + context * facts.cache_bytes_per_token
        rows.append({"context": context, "ms": milliseconds(times["reproducible"]), "fast_ms": milliseconds(times["fast"]),
                     "limit_ms": moved / median(reads) / 1e6, "read_gb_per_s": median(reads), "free_rows": free(times["reproducible"]),
                     "reproducible_over_fast": {n: ratio(times["reproducible"][n], times["fast"][n]) for n in (1, 5)}})
        tell(f"context {context}: {rows[-1]['ms'][1]:.1f} ms")
    return rows


def by_batch(target: Any, batches: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for batch in batches:
        times = passes_of(target, CONTEXT, batch, repeats)
        rows.append({"batch": batch, "ms": milliseconds(times), "free_rows": free(times)})
        tell(f"batch {batch}: {rows[-1]['ms'][1]:.1f} ms")
    return rows


def by_vocabulary(vocabularies: Sequence[int], work: Path, dtype: str | None, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for vocabulary in vocabularies:
        target = load(random_model(vocabulary, work), dtype, CONTEXT)
        times = passes_of(target, CONTEXT, 1, repeats)
        outside = {name: constant_overhead(vocabulary, options, 4, 1)["overhead_ms"] for name, options in
                   (("greedy", {}), ("top-p 0.95", {"temperature": 0.8, "top_p": 0.95}))}
        rows.append({"vocabulary": vocabulary, "ms": milliseconds(times), "free_rows": free(times), "outside_ms": outside})
        tell(f"vocabulary {vocabulary}: {rows[-1]['ms'][1]:.1f} ms")
    return rows


def against_formula(work: Path, dtype: str | None, count: int, tokens: int) -> list[dict[str, Any]]:
    """Per depth: E, the formula's speed-up, the measured one, and the milliseconds of a round beyond the models' passes alone."""
    folders = {name: inflated(WEIGHTS / name, name, work, 0) for name in SHAPES}
    prompts = read_prompts(WEIGHTS / "prompts.jsonl", AutoTokenizer.from_pretrained(folders["target"]), count, 120, 300)
    options = LoadConfig(dtype=dtype, device="cpu", cache_tokens=16_384, self_test=False)
    target, small = load_target(folders["target"], options), load_target(folders["draft"], options)
    alone = [scoring_pass(model, prompts[0], [d + 1 for d in (0, *DEPTHS)]) for model in (target, small)]
    plain, draft = alone[0][1], alone[1][1]
    with Engine(target, ModelDrafter(small)) as engine:
        runs: dict[int, list[Any]] = {depth: [] for depth in (0, *DEPTHS)}
        order, rng = [0, *DEPTHS], random.Random(0)
        for prompt in [prompts[0], *prompts]:          # the first one twice: it warms up
            rng.shuffle(order)
            for depth in order:
                wish = {"depth": depth} if depth else {"drafter": "none"}
                sampling = Sampling(temperature=0.0, seed=1, max_tokens=tokens if runs[depth] else 8, ignore_eos=True)
                handle = engine.submit(prompt, sampling, speculation=wish)[0]
                while not handle.done:
                    engine.step()
                runs[depth].append(handle.completion().metrics)
    rows = []
    for depth in DEPTHS:
        metrics, off = runs[depth][1:], runs[0][1:]
        rounds = sum(m["rounds"] for m in metrics)
        emitted = sum(m["rounds"] * m["acceptance_length"] for m in metrics) / rounds
        spent = {name: 1e3 * sum(m[f"{name}_s"] for m in metrics) / rounds for name in ("draft", "score", "verify", "other")}
        rows.append({
            "depth": depth, "tokens_per_round": emitted, "formula": speedup(emitted, depth, draft / plain, alone[0][depth + 1] / plain),
            "measured": paired([[1 / m["tpot_s"]] for m in metrics], [[1 / m["tpot_s"]] for m in off]),
            "round_ms": {**spent, "draft alone": depth * draft, "score alone": alone[0][depth + 1]}})
    return rows


def milliseconds(times: Times) -> dict[int, float]:
    return {rows: 1e3 * median(found) for rows, found in times.items()}


def ratio(over: Sequence[float], under: Sequence[float]) -> dict[str, float]:
    """Of times, paired by turn."""
    return paired([[x] for x in over], [[x] for x in under])


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The page.

def table(headings: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

    rows = [list(headings), ["---:"] * len(headings), *[[cell(value) for value in line] for line in lines]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page(found: dict[str, Any], picture: str | None) -> str:
    facts, widths = found["provenance"], [f"{n} rows" if n > 1 else "1 row" for n in WIDTHS]
    machine = facts["machine"]
    parts = [f"Made by `{facts['command']}` on {facts['date']}, revision {facts['versions']['revision']}: {machine['cpu']}, "
             f"{machine['threads']} threads, {found['dtype']}, {found['parameters'] / 1e6:.0f} M parameters, "
             f"{found['read_gb_per_s']:.1f} GB/s read, load {machine['load_average']}. "
             f"Milliseconds, medians. *Free*: rows of a text that cost at most {FREE} times one row."]
    if picture:
        parts.append(f"![A pass by context, by rows in a batch, and by vocabulary]({picture})")
    parts += ["**By context**, batch 1", table(
        ["context", *widths, "limit", "free", "reproducible ÷ fast, 1 row", "5 rows"],
        [[r["context"], *r["ms"].values(), r["limit_ms"], r["free_rows"], *map(shown, r["reproducible_over_fast"].values())]
         for r in found["context"]])]
    parts += [f"**By batch**, {CONTEXT} tokens each; rows of each text", table(
        ["batch", *widths, "free"], [[r["batch"], *r["ms"].values(), r["free_rows"]] for r in found["batch"]])]
    parts += ["**By vocabulary**; the last two columns are a round of depth 4 outside the passes, with models that cost nothing", table(
        ["vocabulary", *widths, "free", "greedy", "top-p 0.95"],
        [[r["vocabulary"], *r["ms"].values(), r["free_rows"], *r["outside_ms"].values()] for r in found["vocabulary"]])]
    parts += ["**Against the formula**: the inflated pair of 579 M and 18 M, greedy; milliseconds of a round, the models' passes alone in "
              "brackets", table(["depth", "tokens a round", "formula", "measured", "share", "draft", "score", "verify", "other"],
                    [[r["depth"], f"{r['tokens_per_round']:.2f}", f"{r['formula']:.2f}×", shown(r["measured"]),
                      f"{r['measured']['median'] / r['formula']:.0%}",
                      *(f"{r['round_ms'][step]:.1f} ({r['round_ms'][step + ' alone']:.1f})" for step in ("draft", "score")),
                      r["round_ms"]["verify"], r["round_ms"]["other"]] for r in found["formula"]])]
    return "\n\n".join(parts)


def draw(found: dict[str, Any], file: Path) -> None:
    """Three panels: by context with the limit, by rows of all texts, by vocabulary."""
    with style.sheet() as colours:
        figure = style.figure(4.2)
        panels = figure.subplots(1, 3)
        series: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
            ("1 row", lambda r: r["ms"][1]), ("5 rows", lambda r: r["ms"][5]), ("1 row, fast", lambda r: r["fast_ms"][1])]
        for (name, value), look in zip(series, style.looks(colours, 3), strict=True):
            panels[0].plot([r["context"] for r in found["context"]], [value(r) for r in found["context"]], label=name, **look)
        panels[0].plot([r["context"] for r in found["context"]], [r["limit_ms"] for r in found["context"]], linestyle="--",
                       color=colours["plain"], label="reading once")
        panels[0].set(xlabel="tokens before the pass", ylabel="milliseconds per pass")
        for r, look in zip(found["batch"], style.looks(colours, len(found["batch"])), strict=True):
            panels[1].plot([n * r["batch"] for n in WIDTHS], list(r["ms"].values()), label=f"batch {r['batch']}", **look)
        panels[1].set(xlabel="rows of all texts")
        for (name, value), look in zip([*series[:2], ("outside, top-p 0.95", lambda r: r["outside_ms"]["top-p 0.95"])],
                                       style.looks(colours, 3), strict=True):
            panels[2].plot([r["vocabulary"] for r in found["vocabulary"]], [value(r) for r in found["vocabulary"]], label=name, **look)
        panels[2].set(xlabel="tokens in the vocabulary")
        marks = [r["context"] for r in found["context"]], [4 ** n for n in range(5)], [r["vocabulary"] for r in found["vocabulary"]]
        for axes, name, ticks in zip(panels, ("Context", "Batch", "Vocabulary"), marks, strict=True):
            axes.set_xscale("log", base=2)
            # Labels of our own: a log axis writes formulas, which our sheet shows as they are typed.
            axes.set_xticks(ticks, [f"{n >> 10}k" if n >= 1 << 10 else str(n) for n in ticks])
            axes.set_xticks([], minor=True)
            axes.set_ylim(0, None)
            axes.grid(True)
            axes.legend()
            style.title(axes, name, "", colours)
        style.save(figure, file, "svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 16384, 32768])
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16])
    parser.add_argument("--vocabularies", type=numbers, default=[4096, 32768, 131072, 262144])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=5, help="of the last table")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--dtype", help="bfloat16 or float32 (default: what a load would choose)")
    parser.add_argument("--work", type=Path, help="where models are kept (default: a temporary folder)")
    parser.add_argument("--write", type=Path, help="put the tables between the marks of this page, and a picture into images/ beside it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        tokens = max(*args.contexts, max(args.batches) * (CONTEXT + 256))
        targets = {mode: load(random_model(SMALL_VOCABULARY, work), args.dtype, tokens, mode) for mode in MODES}
        usual, memory = targets["reproducible"], Memory()
        found: dict[str, Any] = {"dtype": usual.facts.dtype, "parameters": usual.facts.parameters, "read_gb_per_s": memory.read(),
                                 "context": by_context(targets, args.contexts, args.repeats, memory),
                                 "batch": by_batch(usual, args.batches, args.repeats)}
        del targets, usual
        found["vocabulary"] = by_vocabulary(args.vocabularies, work, args.dtype, args.repeats)
        found["formula"] = against_formula(work, args.dtype, args.prompts, args.tokens)
    found["provenance"] = provenance()
    found["goals"] = [{"name": f"reproducible ÷ fast at {r['context']}", "value": r["reproducible_over_fast"][1]["median"],
                       "goal": GOALS[r["context"]], "met": r["reproducible_over_fast"][1]["median"] <= GOALS[r["context"]]}
                      for r in found["context"] if r["context"] in GOALS]
    picture = None
    if args.write:
        picture = "images/scale.svg"
        (args.write.parent / "images").mkdir(exist_ok=True)
        draw(found, args.write.parent / picture)
        put(args.write, "scale", page(found, picture))
    print(page(found, picture))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

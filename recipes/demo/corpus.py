"""Build the demo corpus: a tokenizer, training ids and held-out prompts, from the Python files of this machine.

    python recipes/demo/corpus.py WORK

Sources are the standard library (without its tests) and the packages in PACKAGES, as installed; nothing of them is
committed. Besides whole files the corpus holds exercises that are derived from the same files by rule, never by a model:

  chat   a docstring as the request, the function as the answer, in the chat template of the demo model
  edit   a function, the order to rename one identifier, and the function after it
  data   records written out twice in two notations (JSON lines, then CSV or Python literals)

Whole files are held out by a hash of their path (1 in 64): no exercise and no training text comes from them.
Writes WORK/tokenizer.json, WORK/train.bin and WORK/heldout.bin (uint16 ids) and WORK/prompts.jsonl.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import importlib.util
import io
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 4096
PACKAGES = (
    "rich",
    "click",
    "jinja2",
    "networkx",
    "packaging",
    "pip",
    "setuptools",
    "_pytest",
    "huggingface_hub",
    "fsspec",
    "tqdm",
    "pygments",
    "typer",
    "httpx2",
    "anyio",
    "filelock",
)
END, USER, ASSISTANT, STOP = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
SEED = 20261120


def files() -> Iterator[tuple[str, str]]:
    """(name, text) of every source file, in a stable order."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    roots = [("stdlib", stdlib)]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            roots.append((package, Path(next(iter(spec.submodule_search_locations)))))
    skip = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "turtledemo", "config-3.11-x86_64-linux-gnu"}
    for label, root in roots:
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if skip & set(relative.parts) or path.stat().st_size > 200_000:
                continue
            try:
                text = path.read_text("utf-8")
            except UnicodeDecodeError:
                continue
            lines = text.count("\n") + 1
            if len(text) > 200 and len(text) / lines < 120:  # generated tables teach nothing but their digits
                yield f"{label}/{relative}", text


def held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % 64 == 0


def functions(text: str) -> list[tuple[str, str, str]]:
    """(name, first paragraph of the docstring, source) of every documented function of up to 40 lines."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.end_lineno and 3 < node.end_lineno - node.lineno < 40:
            source = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
            indent = len(source) - len(source.lstrip())
            source = "\n".join(line[indent:] for line in source.splitlines())
            doc = (ast.get_docstring(node) or "").split("\n\n")[0]
            found.append((node.name, " ".join(doc.split()), source))
    return found


def chat(request: str, answer: str) -> str:
    return f"{USER}{request}{ASSISTANT}{answer}{STOP}"


def edit_exercise(source: str, rng: random.Random) -> tuple[str, str] | None:
    """(request, answer): rename the most used local identifier to a fresh one."""
    names = re.findall(r"\b[a-z_][a-z_0-9]{2,}\b", source)
    common = [
        n
        for n in sorted(set(names))
        if 2 < names.count(n) < 12 and n not in {"self", "def", "return", "for", "not", "and", "import", "else", "raise", "None", "the"}
    ]
    if not common:
        return None
    old, new = rng.choice(common), rng.choice(["value", "item", "result", "entry", "node", "current", "data", "buffer", "total", "record"])
    if new in names:
        return None
    renamed = re.sub(rf"\b{old}\b", new, source)
    return f"Rename {old} to {new}:\n```python\n{source}\n```", f"```python\n{renamed}\n```"


def data_exercise(words: list[str], rng: random.Random) -> tuple[str, str]:
    """(request, answer): the same records in another notation."""
    keys = rng.sample(words, rng.randint(2, 4))
    kinds = [rng.choice("wid") for _ in keys]

    def cell(kind: str) -> object:
        return rng.choice(words) if kind == "w" else rng.randint(0, 999) if kind == "i" else round(rng.random() * 100, 1)

    rows = [{k: cell(t) for k, t in zip(keys, kinds, strict=True)} for _ in range(rng.randint(4, 9))]
    table = io.StringIO()
    writer = csv.DictWriter(table, keys, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    forms = {
        "JSON lines": "\n".join(json.dumps(r) for r in rows),
        "CSV": table.getvalue().rstrip(),
        "a Python list": "rows = [\n" + "".join(f"    {r!r},\n" for r in rows) + "]",
    }
    source, target = rng.sample(sorted(forms), 2)
    if rng.random() < 0.3:
        target = source
    return f"Write these records as {target}:\n{forms[source]}", forms[target]


def exercises(text: str, words: list[str], rng: random.Random, share: float = 1.0) -> Iterator[tuple[str, str, str]]:
    """(class, request, answer) derived from one file."""
    for name, doc, source in functions(text):
        if len(doc) > 20 and rng.random() < 0.5 * share:
            yield "code", f"Write a function {name}: {doc}", f"```python\n{source}\n```"
        if len(source) < 1200 and rng.random() < 0.25 * share:
            pair = edit_exercise(source, rng)
            if pair:
                yield "edit", *pair
    for _ in range(rng.randint(0, 2) if share >= 1 else 1):
        yield "data", *data_exercise(words, rng)


def prompts(texts: list[tuple[str, str]], words: list[str]) -> Iterator[dict[str, str]]:
    """Held-out prompts by class: code, prose, data (repetition and edits)."""
    rng = random.Random(SEED + 1)
    for name, text in texts:
        for kind, request, _ in exercises(text, words, rng, 0.9):
            if kind == "code":
                if len(request) < 400:
                    yield {"class": "code", "prompt": f"{USER}{request}{ASSISTANT}", "source": name}
            elif len(request) < 900:
                yield {"class": "data", "prompt": f"{USER}{request}{ASSISTANT}", "source": name}
        lines = text.splitlines(keepends=True)
        if len(lines) > 80:
            start = rng.randrange(0, len(lines) - 60)
            yield {"class": "code", "prompt": "".join(lines[start : start + 24]), "source": name}
        for match in list(re.finditer(r'"""(?:[^"\\]|\\.){400,3000}?"""', text))[:2]:
            body = match.group(0)
            yield {
                "class": "prose",
                "prompt": text[max(0, match.start() - 300) : match.start()] + body[: max(160, len(body) // 3)],
                "source": name,
            }


def main(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    everything = list(files())
    train = [(n, t) for n, t in everything if not held_out(n)]
    test = [(n, t) for n, t in everything if held_out(n)]
    print(f"{len(train)} files, {sum(len(t) for _, t in train) / 1e6:.1f} MB to train; {len(test)} files held out")
    words = sorted({w for n, t in train[:400] for w in re.findall(r"\b[a-z]{3,9}\b", t)})
    rng = random.Random(SEED)
    documents = [t for _, t in train] + [chat(r, a) for _, t in train for _, r, a in exercises(t, words, rng)]
    rng.shuffle(documents)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents[::4],
        trainers.BpeTrainer(
            vocab_size=VOCABULARY, special_tokens=[END, USER, ASSISTANT, STOP], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer.save(str(work / "tokenizer.json"))
    for name, texts in (("train", documents), ("heldout", [t for _, t in test])):
        ids = [i for e in tokenizer.encode_batch([t + END for t in texts]) for i in e.ids]
        np.array(ids, dtype=np.uint16).tofile(work / f"{name}.bin")
        print(f"{name}: {len(ids) / 1e6:.2f} M tokens")
    chosen = list(prompts(test, words))
    random.Random(SEED + 2).shuffle(chosen)
    with open(work / "prompts.jsonl", "w") as out:
        out.writelines(json.dumps(p) + "\n" for p in chosen)
    print({c: sum(p["class"] == c for p in chosen) for c in ("code", "prose", "data")})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    main(parser.parse_args().work)

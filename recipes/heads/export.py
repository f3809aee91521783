"""Put the trained heads into the package, with a page on what each saw.

    python recipes/heads/export.py WORK [NAME …]

Copies WORK/NAME (what `draftproof train` published) to src/draftproof/weights/NAME and writes HEADS.md from WORK/NAME.json and the
head's checkpoint. A head that was not published is left out, with the reason; the page keeps the rows of heads that are not named.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from safetensors import safe_open

from draftproof.models.load import WEIGHTS

FILE_LIMIT, TOTAL_LIMIT = 45_000_000, 96_000_000
NAMES = ["eagle3", "medusa", "mlp", "mtp", "dflash", "pard"]
TOP = """# The built-in heads

Draft heads for the built-in demo target, made by `recipes/heads` with `draftproof train`: the target answered prompts drawn from the
files of its own training corpus (see MODEL_CARD.md), greedily and at temperature 0.8 in turn, and the heads learnt from its hidden
states and its distributions. Held-out prompts judged them; *acceptance length* is what the engine measured there at the head's
depth, over temperature 0 and 1. They know nothing but this target and are of use with it only.

`eagle3` was trained in four goes: 1,800 steps on 1,184 texts with the 2,048 tokens that the target writes most (acceptance length 2.15);
with a row for every token 1,800 steps on 6,103 texts, three in ten of them pieces of the corpus itself (2.74); 2,600 steps on 15,904 texts,
as many in ten, five steps deep (2.98); and on the same the steps of the table. Every go was judged on other prompts, as were the others.

| head | parameters | bytes | steps | texts | acceptance length when served (rounds) |
|---|---|---|---|---|---|
"""


def row(work: Path, name: str, folder: Path) -> str:
    result = json.loads((work / f"{name}.json").read_text(encoding="utf-8"))
    # a run that is over leaves the one, a killed one the other
    left = [work / f"{name}.training" / f"{file}.safetensors" for file in ("finished", "checkpoint")]
    with safe_open(next((file for file in left if file.exists()), left[0]), framework="pt") as file:
        metadata = file.metadata()
    notes = json.loads(metadata["notes"])
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    return (f"| {name} | {result['parameters'] / 1e6:.2f} M | {size / 1e6:.1f} MB | {metadata['step']} | {notes['texts']} "
            f"| {result['acceptance_length']:.2f} ({result['rounds']}) |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--out", type=Path, default=WEIGHTS)
    args = parser.parse_args()
    page = args.out / "HEADS.md"
    before = page.read_text("utf-8").splitlines() if page.exists() else []
    rows = {line.split()[1]: line for line in before if line.startswith("| ")}
    for name in args.names:
        source = args.work / name
        if not (source / "config.json").is_file():
            print(f"{name}: not published, left out")
            continue
        shutil.rmtree(args.out / name, ignore_errors=True)
        shutil.copytree(source, args.out / name)
        for file in (args.out / name).iterdir():
            file.chmod(0o644)
        rows[name] = row(args.work, name, args.out / name)
    lines = [rows[name] for name in dict.fromkeys([*NAMES, *args.names]) if name in rows]
    page.write_text(TOP + "\n".join(lines) + "\n", encoding="utf-8")
    sizes = [file.stat().st_size for file in args.out.rglob("*") if file.is_file()]
    if max(sizes) > FILE_LIMIT or sum(sizes) > TOTAL_LIMIT:
        raise SystemExit(f"{args.out}: largest file {max(sizes)} bytes, all {sum(sizes)}; expected at most {FILE_LIMIT} and {TOTAL_LIMIT}")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""Prompts to train the demo's heads on, from the same files as the demo target's own corpus.

    python recipes/heads/traffic.py WORK --prompts 2000 --documents 2000 --seed 7

Writes WORK/traffic.jsonl, one {"prompt", "class"} a line: requests in the target's own template and beginnings of passages, of
the classes that `draftproof demo` measures, never from a file that is held out. The answers are the target's business:
`draftproof train` lets it write them. And WORK/general.jsonl, one {"text"} a line: whole files and exercises with their answers, drawn
from the same files as the target's own training text, for `--mix`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "demo"))
from corpus import chat, exercises, files, held_out, prompts  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    texts = [(name, text) for name, text in files() if not held_out(name)]
    words = sorted({word for _, text in texts[:400] for word in re.findall(r"\b[a-z]{3,9}\b", text)})
    by_class: dict[str, list[str]] = {}
    for found in prompts(texts, words):
        by_class.setdefault(found["class"], []).append(found["prompt"])
    rng = random.Random(args.seed)
    each = args.prompts // len(by_class)
    chosen = [(name, prompt) for name, group in sorted(by_class.items()) for prompt in rng.sample(group, min(each, len(group)))]
    rng.shuffle(chosen)
    args.work.mkdir(parents=True, exist_ok=True)
    with open(args.work / "traffic.jsonl", "w", encoding="utf-8") as out:
        # temperatures alternate: a head meets the target's greedy text and its sampled text when it is served
        for i, (name, prompt) in enumerate(chosen):
            request = {"prompt": prompt, "temperature": (0.0, 0.8)[i % 2], "metadata": {"prompt_class": name}}
            out.write(json.dumps({"request": request}) + "\n")
    documents = [text for _, text in texts]
    documents += [chat(request, answer) for text in documents for _, request, answer in exercises(text, words, rng)]
    with open(args.work / "general.jsonl", "w", encoding="utf-8") as out:
        out.writelines(json.dumps({"text": text}) + "\n" for text in rng.sample(documents, min(args.documents, len(documents))))
    print({name: len(group) for name, group in by_class.items()}, "found,", len(chosen), "written")


if __name__ == "__main__":
    main()

"""Train the demo's heads, one after the other, on the demo target's own answers, and put them into the package.

    python recipes/heads/traffic.py WORK
    python recipes/heads/train.py WORK [NAME …] [--scale 1.0]       # 20 to 30 minutes a head, eagle3 100, on one thread; killed, it goes on

Each head is what `draftproof train` makes of WORK/traffic.jsonl; nothing here is special to the demo but the list. --scale
multiplies the steps. Prints what ran; WORK/NAME.json keeps the result, from which `export.py` writes the model card.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

STEPS = 450
# Token 128 is the byte C0, which no UTF-8 text holds: it serves as a mask.
RECIPES = {  # name → options of `draftproof train`, steps as a share of STEPS
    "eagle3": (["--draft-vocab", "2048", "--depth", "4", "--lr", "2e-3"], 4.0),
    "medusa": (["--depth", "5", "--layers", "2", "--lr", "1e-2"], 1.0),
    "mlp": (["--shared", "--depth", "5", "--lr", "1e-2"], 1.0),
    "mtp": (["--depth", "4", "--lr", "2e-3"], 1.0),
    "dflash": (["--layers", "2", "--depth", "7", "--lr", "2e-3"], 1.0),
    "pard": (["--depth", "6", "--mask-token", "128", "--lr", "1e-3"], 0.75),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", choices=[*RECIPES, []], default=[])
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    for name in args.names or RECIPES:
        options, share = RECIPES[name]
        command = [sys.executable, "-m", "draftproof", "train", name, "--data", str(args.work / "traffic.jsonl"),
                   "--answers", str(args.work / "answers.jsonl"), "--out", str(args.work / name), "--length", "384", "--batch", "4",
                   "--steps", str(max(1, round(STEPS * share * args.scale))), "--json", *options]
        if name == "pard":
            from draftproof.models.load import builtin

            command += ["--init", str(builtin("draft"))]
        print(" ".join(command), flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if done.returncode not in (0, 3):
            raise SystemExit(f"{name}: exit code {done.returncode}")
        (args.work / f"{name}.json").write_text(done.stdout.strip().splitlines()[-1] + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

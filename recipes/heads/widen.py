"""A draft vocabulary made whole: an EAGLE-3 head with a reduced output, given a row for every token of the target.

    python recipes/heads/widen.py HEAD NEW

The rows that the head has are kept. Those it lacks come from the target's own output matrix, through the linear map that takes the
target's rows to the head's with the least squared error over the tokens that both have: a place to go on from (`--init NEW`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draftproof.models.load import builtin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    config, tensors = json.loads((args.head / "config.json").read_text("utf-8")), load_file(args.head / "model.safetensors")
    target = load_file(builtin("target") / "model.safetensors")
    theirs = target.get("lm_head.weight", target["model.embed_tokens.weight"]).float()
    offsets, own = tensors.pop("d2t"), tensors["lm_head.weight"]
    ids = torch.arange(own.shape[0]) + offsets
    del tensors["t2d"]
    found = torch.linalg.lstsq(theirs[ids].double(), own.double()).solution.float()
    rows = theirs @ found
    error = (rows[ids] - own.float()).norm() / own.float().norm()
    rows[ids] = own.float()
    tensors["lm_head.weight"] = rows.to(own.dtype)
    args.new.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.new / "model.safetensors")
    (args.new / "config.json").write_text(json.dumps({**config, "draft_vocab_size": rows.shape[0]}, indent=2) + "\n", encoding="utf-8")
    print(f"{own.shape[0]} rows kept, {rows.shape[0] - own.shape[0]} made; over the kept ones the map leaves {error:.0%}")


if __name__ == "__main__":
    main()

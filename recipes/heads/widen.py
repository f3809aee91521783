"""A draft vocabulary made whole: an EAGLE-3 head with a reduced output, given a row for every token of the target.

    python recipes/heads/widen.py HEAD NEW

The rows that the head has are kept. Those it lacks come from the target's own output matrix, through the linear map that takes the
target's rows to the head's with the least squared error over the tokens that both have: a place to go on from (`--init NEW`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file

from draftproof.models.heads.files import read_files, write_files
from draftproof.models.heads.vocabulary import draft_ids
from draftproof.models.load import builtin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    head, target = read_files(args.head), load_file(builtin("target") / "model.safetensors")
    theirs = target.get("lm_head.weight", target["model.embed_tokens.weight"]).float()
    tensors = {name: tensor for name, tensor in head.tensors.items() if name not in ("d2t", "t2d")}
    own = tensors["lm_head.weight"]
    ids = draft_ids(head.tensors, own.shape[0], theirs.shape[0], args.head)
    if ids is None:
        raise SystemExit(f"{args.head} has a row for each of the target's {own.shape[0]} tokens; expected a head with fewer")
    found = torch.linalg.lstsq(theirs[ids].double(), own.double()).solution.float()
    rows = theirs @ found
    error = (rows[ids] - own.float()).norm() / own.float().norm()
    rows[ids] = own.float()
    tensors["lm_head.weight"] = rows.to(own.dtype)
    write_files(args.new, {**head.config, "draft_vocab_size": rows.shape[0]}, tensors)
    print(f"{own.shape[0]} rows kept, {rows.shape[0] - own.shape[0]} made; over the kept ones the map leaves {error:.0%}")


if __name__ == "__main__":
    main()

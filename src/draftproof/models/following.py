"""A process that holds one share of a target and does what the leading process says, until its line closes (leading.py).

    python -m draftproof.models.following FD        FD: the inherited line
"""

from __future__ import annotations

import sys
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from ..errors import DraftproofError
from ..types import Draft
from .load import load_part
from .shares import Ranks
from .target import Slot, Target


def follow(line: Connection) -> None:
    """Load the share that the first message names, and obey. Answers "" at the start, and then "" again or what is wrong."""
    path, config, fused, rank, store = line.recv()
    with suppress(ConnectionError):                 # the leader has ended, often of the same: nobody hears what is said
        line.send("")
        try:
            ranks = Ranks(rank, config.tensor_parallel, store, torch.device(config.device))
            target = load_part(path, config, fused, ranks)
        except (DraftproofError, RuntimeError) as error:
            line.send(str(error) or type(error).__name__)
            return
        line.send("")
        obey(target, line)


def obey(target: Target, line: Connection) -> None:
    """Every call that the leader makes, made here."""
    slots: dict[int, Slot] = {}
    while True:
        try:
            name, *call = line.recv()
        except EOFError:
            return
        try:
            match name:
                case "open":
                    number, tokens, tenant, room = call
                    slots[number] = target.open(tokens, tenant, room)
                case "extend":
                    numbers, texts = call
                    target.extend([slots[n] for n in numbers], [torch.tensor(ids, dtype=torch.int64) for ids in texts])
                case "score":
                    numbers, roots, drafts = call
                    target.score([slots[n] for n in numbers], torch.tensor(roots, dtype=torch.int64),
                                 [Draft(torch.tensor(ids, dtype=torch.int64), parents) for ids, parents in drafts])
                case "rewind" | "truncate":
                    number, what = call
                    getattr(target, name)(slots[number], what)
                case "close":
                    target.close(slots.pop(call[0]))
        except DraftproofError:
            continue  # a full cache is full for the leader, too, who says so


if __name__ == "__main__":
    follow(Connection(int(sys.argv[1])))

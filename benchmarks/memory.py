"""What the memory gives at this moment: the limit of a pass that must read every weight."""

from __future__ import annotations

import torch

from draftproof.bench.profile import large_block, reading


class Memory:
    """What the memory gives: GB/s of summing `megabytes` of float32, more than the caches hold, with torch's threads."""

    def __init__(self, megabytes: int = 1024) -> None:
        self.data = large_block(megabytes, torch.device("cpu"))

    def read(self, repeats: int = 2) -> float:
        return self.data.nbytes / min(reading(self.data) for _ in range(repeats)) / 1e9

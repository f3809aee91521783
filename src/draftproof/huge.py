"""Room for weights, and for keys, in huge pages, 2 MB each on Linux. A pass reads all of a model's weights, whose small pages are too many
for the processor's table of addresses; afterwards whatever runs next finds its own pages pushed out of it, too (docs/log.md has the
figures)."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

PAGE = 2 << 20      # bytes
BLOCK = 16 * PAGE   # small matrices lie together: a page that nobody has written to takes no memory
LINE = 64           # bytes: where vectors begin


class _Block:
    """The memory that is given away next, from `used` on. It goes back to the system with the last tensor in it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: mmap.mmap | None = None
        self.used = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """Memory with `size` bytes to spare, and where they begin."""
        if size > BLOCK // 4:
            return _mapped(-(-size // PAGE) * PAGE), 0
        with self.lock:
            if self.held is None or len(self.held) - self.used < size:
                self.held, self.used = _mapped(BLOCK), 0
            at, self.used = self.used, self.used + -(-size // LINE) * LINE
            return self.held, at


_block = _Block()


def room(numbers: int) -> Tensor:
    """int32 [numbers], of any content, in huge pages where the system has them."""
    if numbers == 0 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(numbers, dtype=torch.int32)
    held, at = _block.take(4 * numbers)
    return torch.frombuffer(held, dtype=torch.int32, count=numbers, offset=at)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros, of a page or more in pages of their own, which go back to the system with them; what nobody has written to takes no memory."""
    size = math.prod(shape) * dtype.itemsize
    if size < PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    return torch.frombuffer(_mapped(-(-size // PAGE) * PAGE), dtype=torch.uint8, count=size).view(dtype).view(*shape)


def _mapped(size: int) -> mmap.mmap:
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory is seldom given huge pages
    try:
        held.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        pass
    return held

"""What servers count while an arm runs under a load: their counters before and after every block of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .cells import OFF
from .endpoint import Counters, Endpoint
from .load import Load
from .sweep import Arm


class Meter:
    """One sum for each arm under each load. Engines in this process count request by request and have no entry."""

    def __init__(self) -> None:
        self.counted: dict[tuple[str, Load], Counters] = {}

    @contextmanager
    def around(self, arm: Arm, load: Load) -> Iterator[None]:
        """Counts what happens inside under the arm and the load."""
        if not isinstance(arm.client, Endpoint):
            yield
            return
        before = arm.client.counters()
        yield
        after = arm.client.counters()
        # Of a block with an end that could not be read nothing is known: the rest of the server's life is not the block's.
        found = Counters() if before is None or after is None else after.since(before)
        # off has no drafts: what its server counted besides is of others, or late.
        found = Counters(found.engine) if arm.name == OFF else found
        self.counted[arm.name, load] = self.counted.get((arm.name, load), Counters()) + found

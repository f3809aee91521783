"""Drafters that a server can be told to compare: `custom:serve.ab_drafters:NAME`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from draftproof import Draft
from draftproof.drafters.base import PerSequence, Site
from draftproof.drafters.fixed import AlwaysWrong, TextState
from draftproof.types import Budget


class Wrong(AlwaysWrong):
    """Never right in greedy texts: it looks at what the target would choose."""

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Wrong:
        target: Any = site.target
        return cls(target.vocab_size, lambda text: int(target.law(text).argmax()))


class Slow(PerSequence[TextState]):
    """Takes its time, and then has nothing to say."""

    name = "slow"

    def start(self, seq: Any) -> TextState:
        return TextState(seq)

    def guess(self, state: TextState, budget: Budget) -> Draft:
        time.sleep(0.03)
        return Draft.empty(self.name)


class Breaking(Slow):
    """Breaks when it is first asked."""

    name = "breaking"

    def guess(self, state: TextState, budget: Budget) -> Draft:
        raise RuntimeError("weights are gone")

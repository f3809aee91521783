"""`domino`: a DFlash block whose slots are tied together by a GRU over the tokens before them. In a tree every node is corrected behind
its own path."""

from __future__ import annotations

from typing import ClassVar

from ..models.heads.dflash import DFlash
from ..models.heads.domino import Domino
from .dspark import DSparkDrafter


class DominoDrafter(DSparkDrafter):
    """`domino:PATH`. score: perturbed margin, how far log q + g of a token lies above the best other of its slot; a sibling's is
    negative."""

    name = "domino"
    kind: ClassVar[type[DFlash]] = Domino

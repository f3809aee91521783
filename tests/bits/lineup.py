"""Every drafter that can guess for the demo target, by name. A head stands here as it is built in; one that is not, with random
weights from a seed: it guesses badly and costs the text as little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftproof.config import LoadConfig
from draftproof.drafters import build
from draftproof.drafters.base import Drafter
from draftproof.drafters.chain import chained
from draftproof.drafters.dflash import DFlashDrafter
from draftproof.drafters.dflash2 import DFlash2Drafter
from draftproof.drafters.domino import DominoDrafter
from draftproof.drafters.dspark import DSparkDrafter
from draftproof.drafters.eagle import Eagle2Drafter, EagleDrafter
from draftproof.drafters.eagle3 import Eagle3Drafter
from draftproof.drafters.fixed import AlwaysWrong
from draftproof.drafters.hydra import HydraDrafter
from draftproof.drafters.medusa import MedusaDrafter
from draftproof.drafters.mlp import MlpDrafter
from draftproof.drafters.mtp import MtpDrafter
from draftproof.drafters.pard import PardDrafter
from draftproof.drafters.string_level import StringLevel
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.drafters.translate import TokenLevel, TranslatedLm
from draftproof.drafters.vocabulary import Spelling, Words
from draftproof.drafters.xpress import XPressDrafter
from draftproof.models.heads.dflash import DFlash
from draftproof.models.heads.dflash2 import DFlash2
from draftproof.models.heads.domino import Domino
from draftproof.models.heads.dspark import DSpark
from draftproof.models.heads.eagle import EagleHead
from draftproof.models.heads.eagle3 import Eagle3Head
from draftproof.models.heads.hydra import HydraHead
from draftproof.models.heads.medusa import MedusaHead
from draftproof.models.heads.mlp import MlpHead
from draftproof.models.heads.mtp import MtpHead
from draftproof.models.heads.xpress import XPress
from draftproof.models.load import WEIGHTS, builtin, load_target
from draftproof.models.target import Target
from draftproof.types import Scores

Make = Callable[[Target], "Drafter | str"]
QUICK = LoadConfig(self_test=False)


def draft() -> Target:
    return load_target(builtin("draft"), QUICK)


class Renamed:
    """The draft model under other ids: every i is called vocabulary − 1 − i."""

    def __init__(self, lm: Target) -> None:
        self.lm, self.facts, self.device, self.context, self.vocab_size = lm, lm.facts, lm.device, lm.context, lm.vocab_size

    def name(self, token: int) -> int:
        return self.vocab_size - 1 - token

    def fits(self, tokens: int) -> bool:
        return self.lm.fits(tokens)

    def open(self, tokens: Sequence[int], tenant: str = "", room: int = 0) -> Any:
        return self.lm.open([self.name(token) for token in tokens], tenant, room)

    def close(self, slot: Any) -> None:
        self.lm.close(slot)

    def truncate(self, slot: Any, length: int) -> None:
        self.lm.truncate(slot, length)

    def extend(self, slots: Sequence[Any], tokens: Sequence[Tensor]) -> Scores:
        found = self.lm.extend(slots, [self.vocab_size - 1 - ids for ids in tokens])
        return Scores(found.logits.flip(-1), found.starts)


def token_level(target: Target) -> Drafter:
    """A vocabulary in another order, in which every ninth longer word is missing and must be spelled."""
    lm = Renamed(draft())
    spelling = Spelling.of(Words.of(target))
    assert spelling is not None
    contents = {lm.name(i): content for i, content in spelling.contents.items()
                if i % 9 or isinstance(content, str) or len(content) == 1}
    own = Spelling(spelling.words, spelling.kind, contents, {content: i for i, content in contents.items()})
    return TokenLevel(TranslatedLm(lm, spelling, own))  # type: ignore[arg-type]


def string_level(target: Target) -> Drafter:
    spelling = Spelling.of(Words.of(target))
    assert spelling is not None
    return StringLevel(draft(), spelling)


def _spec(spec: str) -> Make:
    return lambda target: build(spec, target, "match", QUICK)


def _eagle3(target: Target) -> Drafter:
    return Eagle3Drafter(Eagle3Head.fresh(target.parts, torch.arange(0, target.vocab_size, 3)), target.vocab_size)


def _vector(kind: Any, head: Any) -> Make:
    return lambda target: kind(head.fresh(target.parts, 4), target.parts, target.vocab_size)


FRESH: dict[str, Make] = {
    "eagle": lambda target: EagleDrafter(EagleHead.fresh(target.parts), target.vocab_size),
    "eagle2": lambda target: Eagle2Drafter(EagleHead.fresh(target.parts), target.vocab_size),
    "eagle3": _eagle3,
    "medusa": _vector(MedusaDrafter, MedusaHead),
    "hydra": _vector(HydraDrafter, HydraHead),
    "mlp": _vector(MlpDrafter, MlpHead),
    "mtp": lambda target: MtpDrafter(MtpHead.fresh(target.parts), target.vocab_size),
    "pard": lambda target: PardDrafter(draft(), 1, target.vocab_size),
    "dflash": lambda target: DFlashDrafter(DFlash.fresh(target.parts), target.vocab_size),
    "dflash2": lambda target: DFlash2Drafter(DFlash2.fresh(target.parts), target.vocab_size),
    "dspark": lambda target: DSparkDrafter(DSpark.fresh(target.parts), target.vocab_size),
    "domino": lambda target: DominoDrafter(Domino.fresh(target.parts), target.vocab_size),
    "xpress": lambda target: XPressDrafter(XPress.fresh(target.parts), target.vocab_size),
}


def trained(name: str) -> bool:
    return all((WEIGHTS / name / file).exists() for file in ("config.json", "model.safetensors"))


def head(name: str) -> Make:
    """The built-in one, if it is there."""

    def make(target: Target) -> Drafter | str:
        if trained(name):
            return build(name, target, "match", QUICK)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return FRESH[name](target)

    return make


def behind_suffix(name: str) -> Make:
    """Where the suffix guesses right, the head must keep up with tokens that are not its own."""
    return lambda target: chained([SuffixDrafter(), head(name)(target)])  # type: ignore[list-item]


LINEUP: dict[str, Make] = {
    "none": lambda target: "none",
    "always wrong": lambda target: AlwaysWrong(target.vocab_size),
    **{spec: _spec(spec) for spec in ("ngram", "suffix", "recycle", "prediction", "grammar", "model", "layer-skip:exit=3",
                                      "layer-skip:exit=8", "ngram+model", "suffix+model", "prediction+suffix+model", "grammar+model")},
    "model, token level": token_level,
    "model, string level": string_level,
    **{name if trained(name) else f"{name}, random": head(name) for name in FRESH},
    **{f"suffix+{name}" if trained(name) else f"suffix+{name}, random": behind_suffix(name) for name in ("eagle3", "medusa", "dflash")},
}
CHAINS_ONLY = {"none", "prediction", "grammar", "model, string level"}
FORCED = {"grammar", "grammar+model"}         # their requests have a grammar

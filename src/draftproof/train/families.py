"""Which drafters can be trained, and how each begins: from a folder, or fresh beside the target."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..errors import LoadError, OptionError
from ..models.heads.detect import detect
from ..models.heads.files import HeadFiles, read_files
from ..models.target import Target
from .base import Task, require_laws
from .corpus import Text
from .place import MODELS

if TYPE_CHECKING:
    from ..models.causal import CausalLM
    from ..models.heads.eagle3 import Eagle3Head

Fused = TypeVar("Fused", bound="Eagle3Head")


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked of the drafter. None means the family's own default.

    init: a folder to begin with · draft_vocab: tokens of a reduced vocabulary (eagle3, peagle, medusa) · layers · depth: tokens guessed, or
    steps unrolled · mask_token: of those that fill masks, one that no text holds · shared: an mlp with the target's embedding and output
    matrix · taps: 0-based layers of the target whose outputs an eagle3 or peagle head reads ·
    accept_at: the temperature at which it learns to be accepted
    """

    init: Path | None = None
    draft_vocab: int | None = None
    layers: int | None = None
    depth: int | None = None
    mask_token: int | None = None
    shared: bool = False
    taps: tuple[int, ...] | None = None
    accept_at: float | None = None

    def check(self, kind: str) -> None:
        """Raises OptionError for what this kind of drafter, or one that begins in a folder, would not heed, and for what it lacks;
        LoadError where that folder holds another kind."""
        for name, value in asdict(self).items():
            if name == "init" or value is None or value is False:
                continue
            option = "--" + name.replace("_", "-")
            if name not in HEEDED[kind]:
                does = [other for other in HEEDED if name in HEEDED[other]]
                raise OptionError(f"{option} does nothing for {kind}; it is of {', '.join(does)}: leave it out")
            if self.init is not None and kind not in MODELS and name not in ("depth", "accept_at"):
                raise OptionError(f"{option} with --init: the drafter in {self.init} has its own; leave one of them out")
        if self.init is not None and kind not in MODELS and not (kind == "mtp" and _whole(self.init)):
            found = detect(read_files(self.init))
            if found != kind:
                raise LoadError(f"--init {self.init} is a head for drafter {found}; expected one for {kind}: name another folder, or train "
                                f"{found}")
        if self.init is None and kind == "pard":
            raise OptionError("pard is trained from a small language model: name one with --init")
        if self.init is None and kind == "model":
            raise OptionError("a draft model is distilled from a small language model with the target's tokenizer: name one with --init")
        if self.mask_token is None and (kind == "pard" or kind == "peagle" and self.init is None):
            raise OptionError(f"{kind} needs --mask-token, the id of a token that no text holds")

    def fit(self, target: Target) -> None:
        """Raises OptionError for numbers that the target does not have."""
        count = len(target.parts.layers)
        if self.taps is not None and not all(tap < count for tap in self.taps):
            raise OptionError(f"--taps {','.join(map(str, self.taps))}: the target has {count} layers; expected numbers from 0 to "
                              f"{count - 1}")
        if self.mask_token is not None and self.mask_token >= target.vocab_size:
            raise OptionError(f"--mask-token {self.mask_token}: the target has {target.vocab_size} tokens; expected one of them")

    def settled(self, kind: str, target: Target) -> Wish:
        """The same, but that an mtp head begins as the one in the target's own checkpoint, where there is one and no size is asked for."""
        if kind != "mtp" or self.init is not None or self.layers is not None:
            return self
        place = Path(target.facts.name)
        return replace(self, init=place) if _whole(place) else self

    def begun(self, kind: str) -> str | None:
        """The drafter that a run with these wishes goes on from. None of a fresh one, and where --init is none yet: a checkpoint with a
        head in it, a language model that was never taught to fill masks."""
        if self.init is None or kind == "mtp" and _whole(self.init):
            return None
        if kind == "pard" and "pard_token" not in json.loads((self.init / "config.json").read_text(encoding="utf-8")):
            return None
        return f"{kind}:{self.init}"

    @property
    def files(self) -> HeadFiles | None:
        return None if self.init is None else read_files(self.init)

    def sizes(self, **names: str) -> dict[str, Any]:
        """Arguments for a constructor: its name for a size → ours, where the user gave one."""
        return {theirs: value for theirs, ours in names.items() if (value := getattr(self, ours)) is not None}


def _whole(folder: Path) -> bool:
    """Whether it is a checkpoint with an mtp head in it, not a head alone."""
    from ..models.heads.mtp_files import alone, holds

    try:
        return not alone(folder) and holds(folder)
    except LoadError:               # no checkpoint of this machine's
        return False


BLOCKS = ("dflash", "dflash2", "dspark", "domino", "xpress")
HEEDED: Mapping[str, tuple[str, ...]] = {          # kind → the wishes that it heeds; depth is also how far every kind guesses when judged
    "eagle": ("layers", "depth"), "eagle3": ("draft_vocab", "layers", "depth", "taps", "accept_at"), "hydra": ("layers", "depth"),
    "medusa": ("draft_vocab", "layers", "depth"), "mlp": ("depth", "shared"), "mtp": ("layers", "depth"), "pard": ("depth", "mask_token"),
    "peagle": ("draft_vocab", "layers", "depth", "mask_token", "taps", "accept_at"),
    "model": ("depth",), **dict.fromkeys(BLOCKS, ("layers", "depth", "mask_token")),
}


def counts(texts: Sequence[Text], vocab_size: int) -> Tensor:
    """How often each token stands in the answers [V]."""
    found = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        found += torch.bincount(torch.tensor(text.ids[text.answer_from:]), minlength=vocab_size)[:vocab_size]
    return found


def _vocabulary(target: Target, texts: Sequence[Text], wish: Wish) -> Tensor | None:
    """Target ids of the draft vocabulary, None for the whole."""
    from .eagle3 import draft_vocabulary

    if wish.draft_vocab is None or wish.draft_vocab >= target.vocab_size:
        return None
    d2t, _ = draft_vocabulary(counts(texts, target.vocab_size), wish.draft_vocab)
    return (torch.arange(wish.draft_vocab) + d2t).to(target.device)


def _eagle(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.eagle import EagleHead
    from .eagle import EagleTask

    files = wish.files
    head = EagleHead.read(files, target.parts, target.vocab_size) if files else EagleHead.fresh(target.parts, **wish.sizes(layers="layers"))
    return EagleTask(head, target.parts, **wish.sizes(steps="depth"))


def _fused(kind: type[Fused], target: Target, texts: Sequence[Text], wish: Wish, **sizes: Any) -> Fused:
    """A head of this class; sizes: of a fresh one, where the user gave none."""
    from .warm import warm_eagle3

    files = wish.files
    if files:
        return kind.read(files, target.parts, target.vocab_size)
    head = kind.fresh(target.parts, _vocabulary(target, texts, wish), **{**sizes, **wish.sizes(layers="layers", taps="taps")})
    warm_eagle3(head, target.parts)
    return head


def _eagle3(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.eagle3 import Eagle3Head
    from .eagle3 import Eagle3Task

    return Eagle3Task(_fused(Eagle3Head, target, texts, wish), target.parts, **wish.sizes(steps="depth", accept_at="accept_at"))


def _peagle(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.peagle import PEagleHead
    from .peagle import PEagleTask

    head = _fused(PEagleHead, target, texts, wish, layers=4)          # as many as published ones have
    if wish.mask_token is not None:                                     # of a fresh one: others have their own
        head.mask_token = wish.mask_token
    return PEagleTask(head, target.parts, **wish.sizes(steps="depth", accept_at="accept_at"))


def _medusa(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.medusa import MedusaHead
    from .medusa import MedusaTask

    files, ids = wish.files, _vocabulary(target, texts, wish)
    head = MedusaHead.read(files, target.parts, target.vocab_size) if files else None
    return MedusaTask(target.parts, head=head, output="target" if ids is None else "own", ids=ids,
                      **wish.sizes(depth="depth", layers="layers"))


def _hydra(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.hydra import HydraHead
    from .hydra import HydraTask

    files = wish.files
    head = HydraHead.read(files, target.parts, target.vocab_size) if files else None
    return HydraTask(target.parts, head=head, **wish.sizes(depth="depth", layers="layers"))


def _mlp(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.mlp import MlpHead
    from .mlp import MlpTask

    files = wish.files
    head = MlpHead.read(files, target.parts, target.vocab_size) if files else None
    return MlpTask(target.parts, head=head, tables=wish.shared, **wish.sizes(depth="depth"))


def _mtp(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.mtp import MtpHead
    from ..models.heads.mtp_files import read_head
    from .mtp import MtpTask
    from .warm import warm_mtp

    if wish.init is not None:
        head = MtpHead.read(read_head(wish.init), target.parts, target.vocab_size)
    else:
        head = MtpHead.fresh(target.parts, **wish.sizes(layers="layers"))
        warm_mtp(head, target.parts)
    return MtpTask(head, **wish.sizes(steps="depth"))


def _block(kind: str, target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    """A block head's. Its block holds the anchor and the guesses behind it; of DSpark the anchor's slot is a guess's. No block is of one
    slot."""
    from ..models.heads.dflash import DFlash
    from ..models.heads.dflash2 import DFlash2
    from ..models.heads.domino import Domino
    from ..models.heads.dspark import DSpark
    from ..models.heads.xpress import XPress
    from .dflash import DFlash2Task, DFlashTask, DominoTask, DSparkTask, XPressTask

    heads = {"dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark, "domino": Domino, "xpress": XPress}
    tasks = {"dflash": DFlashTask, "dflash2": DFlash2Task, "dspark": DSparkTask, "domino": DominoTask, "xpress": XPressTask}
    sizes: dict[str, Any] = wish.sizes(layers="layers", mask_token="mask_token")
    if wish.depth is not None:
        sizes["block"] = max(2, wish.depth + (kind != "dspark"))
    files = wish.files
    return tasks[kind](heads[kind].read(files, target.parts, target.vocab_size) if files else heads[kind].fresh(target.parts, **sizes))


def _pard(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from .pard import PardTask

    assert wish.mask_token is not None, "checked by Wish.check"
    return PardTask(_small(target, wish), target.parts, wish.mask_token, **wish.sizes(depth="depth"))


def _model(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from .model import ModelTask

    return ModelTask(_small(target, wish), target.parts)


def _small(target: Target, wish: Wish) -> CausalLM:
    """The language model to begin with. Rows of the target's matrix that no token of its tokenizer has need no like in it."""
    from ..models.causal import CausalLM

    assert wish.init is not None, "checked by Wish.check"
    lm = CausalLM.read(wish.init, target.device)
    needed = target.vocab_size if target.tokenizer is None else min(target.vocab_size, target.tokenizer.vocab_size)
    if lm.vocab_size < needed:
        raise LoadError(f"{wish.init} has {lm.vocab_size} tokens, the target {needed}; expected the target's vocabulary")
    return lm


FAMILIES: Mapping[str, Callable[[Target, Sequence[Text], Wish], Task]] = {
    "eagle": _eagle, "eagle3": _eagle3, "medusa": _medusa, "hydra": _hydra, "mlp": _mlp, "mtp": _mtp, "pard": _pard,
    "model": _model, "peagle": _peagle, **{kind: partial(_block, kind) for kind in BLOCKS},
}


def begin(name: str, target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    """The task of one family. Raises OptionError or LoadError."""
    if name not in FAMILIES:
        raise OptionError(f"{name!r} cannot be trained; expected one of {', '.join(FAMILIES)}")
    wish.check(name)
    wish.fit(target)
    require_laws(target)
    return FAMILIES[name](target, texts, wish)

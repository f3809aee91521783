"""Which drafters can be trained, and how each begins: from a folder, or fresh beside the target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import LoadError, OptionError
from ..models.heads.files import HeadFiles, read_files
from ..models.target import Target
from .base import Task
from .corpus import Text


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked of the drafter. None means the family's own default.

    init: a folder to begin with · draft_vocab: tokens of a reduced vocabulary (eagle3, medusa) · layers · depth: tokens guessed, or
    steps unrolled · mask_token: of pard and dflash, one that no text holds · shared: an mlp with the target's embedding and output matrix ·
    taps: 0-based layers of the target whose outputs an eagle3 head reads ·
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

    @property
    def files(self) -> HeadFiles | None:
        return None if self.init is None else read_files(self.init)

    def sizes(self, **names: str) -> dict[str, Any]:
        """Arguments for a constructor: its name for a size → ours, where the user gave one."""
        return {theirs: value for theirs, ours in names.items() if (value := getattr(self, ours)) is not None}


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


def _eagle3(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.eagle3 import Eagle3Head
    from .eagle3 import Eagle3Task
    from .warm import warm_eagle3

    files, count = wish.files, len(target.parts.layers)
    if files:
        head = Eagle3Head.read(files, target.parts, target.vocab_size)
    elif wish.taps is not None and not all(tap < count for tap in wish.taps):
        raise OptionError(f"--taps {','.join(map(str, wish.taps))}: the target has {count} layers; expected numbers from 0 to {count - 1}")
    else:
        head = Eagle3Head.fresh(target.parts, _vocabulary(target, texts, wish), **wish.sizes(layers="layers", taps="taps"))
        warm_eagle3(head, target.parts)
    return Eagle3Task(head, target.parts, **wish.sizes(steps="depth", accept_at="accept_at"))


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
    from .mtp import MtpTask
    from .warm import warm_mtp

    files = wish.files
    if files:
        head = MtpHead.read(files, target.parts, target.vocab_size)
    else:
        head = MtpHead.fresh(target.parts, **wish.sizes(layers="layers"))
        warm_mtp(head, target.parts)
    return MtpTask(head, **wish.sizes(steps="depth"))


def _dflash(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.dflash import DFlash
    from .dflash import DFlashTask

    files, sizes = wish.files, wish.sizes(layers="layers", mask_token="mask_token")
    block: dict[str, Any] = {} if wish.depth is None else {"block": wish.depth + 1}
    return DFlashTask(DFlash.read(files, target.parts, target.vocab_size) if files else DFlash.fresh(target.parts, **block, **sizes))


def _dspark(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.heads.dspark import DSpark
    from .dflash import DSparkTask

    files, sizes = wish.files, wish.sizes(layers="layers", mask_token="mask_token", block="depth")
    return DSparkTask(DSpark.read(files, target.parts, target.vocab_size) if files else DSpark.fresh(target.parts, **sizes))


def _pard(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.causal import CausalLM
    from .pard import PardTask

    if wish.init is None:
        raise OptionError("pard is trained from a small language model: name one with --init")
    if wish.mask_token is None:
        raise OptionError("pard needs --mask-token, the id of a token that no text holds")
    return PardTask(CausalLM.read(wish.init, target.device), target.parts, wish.mask_token, **wish.sizes(depth="depth"))


def _model(target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    from ..models.causal import CausalLM
    from .model import ModelTask

    if wish.init is None:
        raise OptionError("a draft model is distilled from a small language model with the target's tokenizer: name one with --init")
    lm = CausalLM.read(wish.init, target.device)
    if lm.vocab_size < target.vocab_size and target.tokenizer is not None and lm.vocab_size < target.tokenizer.vocab_size:
        raise LoadError(f"{wish.init} has {lm.vocab_size} tokens, the target {target.vocab_size}; expected the target's vocabulary")
    return ModelTask(lm, target.parts)


FAMILIES: Mapping[str, Callable[[Target, Sequence[Text], Wish], Task]] = {
    "eagle": _eagle, "eagle3": _eagle3, "medusa": _medusa, "hydra": _hydra, "mlp": _mlp, "mtp": _mtp, "pard": _pard, "dflash": _dflash,
    "dspark": _dspark, "model": _model,
}


def begin(name: str, target: Target, texts: Sequence[Text], wish: Wish) -> Task:
    """The task of one family. Raises OptionError or LoadError."""
    if name not in FAMILIES:
        raise OptionError(f"{name!r} cannot be trained; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[name](target, texts, wish)

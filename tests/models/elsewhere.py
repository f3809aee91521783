"""A second device that is not there: tensors that say they lie on it, while the CPU keeps their numbers.

As on a real one, an operation over tensors of two devices fails (but for copies, single numbers and places to index), and numpy and
addresses are out of reach. It calls itself `meta`, the one device besides the CPU whose tensors every build of torch can make.

`WAITS` keeps where the host would wait for a real device until it had done all it was asked: to read numbers, to count those that a mask
chooses, and for a copy in either direction that is not said to be `non_blocking`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from draftproof.engine.round import Rounds
from draftproof.models import load, tiled

NAME = "meta"
CPU = torch.device("cpu")
TILE = 8
READS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2", "is_nonzero", "equal"}
MAY_MIX = {"copy_", "to", "_to_copy", "index", "index_put", "index_put_"}


WAITS: list[str] = []


def waited(what: str) -> None:
    """Notes it with the place in our own code."""
    own = [f for f in traceback.extract_stack() if "/draftproof/" in f.filename and "/tests/" not in f.filename]
    WAITS.append(f"{what} {own[-1].filename.rpartition('/draftproof/')[2]}:{own[-1].lineno} {own[-1].line}" if own else what)


def waits_of_rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The waits of every round that engines run from now on."""
    found: list[list[str]] = []
    run = Rounds.run

    def counted(self: Rounds, *about: Any) -> object:
        WAITS.clear()
        done = run(self, *about)
        found.append(list(WAITS))
        return done

    monkeypatch.setattr(Rounds, "run", counted)
    return found


class Elsewhere(torch.Tensor):
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=NAME)
        made.held = held
        return made  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Elsewhere({self.held!r})"

    def tolist(self) -> Any:
        waited("tolist")
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Present(TorchDispatchMode):
    """Within it the device takes tensors and makes them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False                                    # nothing is compiled here, and to skip it costs more than the rest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Numbers(TorchFunctionMode):
    """Within it Python's numbers reach the device: torch forgets those that are meant for the one whose name this is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            return func(*args, **{**kwargs, "device": CPU}).to(kwargs["device"])
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            places = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(torch.tensor(list(p)).long() if isinstance(p, list | range) else p for p in places), *args[2:])
        return func(*args, **kwargs)


def leaves(value: Any, found: list[Any]) -> list[Any]:
    """What an operation is given or gives, out of its tuples, lists and dictionaries, added to what was found."""
    for one in value.values() if isinstance(value, dict) else value:
        if isinstance(one, tuple | list | dict):
            leaves(one, found)
        else:
            found.append(one)
    return found


def each(value: Any, act: Callable[[Any], Any]) -> Any:
    """The same with every leaf acted on. (torch's own trees were most of what the device costs.)"""
    if isinstance(value, tuple | list):
        return type(value)([each(one, act) for one in value])
    if isinstance(value, dict):
        return {name: each(one, act) for name, one in value.items()}
    return act(value)


def here(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else CPU if isinstance(value, torch.device) else value


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, there, asked, apart = func.overloadpacket.__name__, list[bool](), list[str](), False

    def act(value: Any) -> Any:
        nonlocal apart
        kind = type(value)
        if kind is Elsewhere:
            there.append(True)
            return value.held
        if kind is torch.device:
            asked.append(value.type)
            return CPU
        if isinstance(value, Tensor):
            there.append(False)
            apart = apart or value.ndim > 0
        return value

    own, named = each(args, act), each(kwargs, act) if kwargs else kwargs
    far = True in there
    if apart and far and name not in MAY_MIX:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found at least two devices, cpu and {NAME}")
    if name in MAY_MIX or far and name in READS:
        _note_wait(func, name, args, kwargs, there, asked)
    home = asked[0] == NAME if asked else far and there[0]
    found = func(*own, **named)
    if asked and there and home != there[0] and found is own[0]:
        found = found.clone()  # of the other device's memory
    return each(found, lambda value: Elsewhere(value) if isinstance(value, Tensor) else value) if home else found


def _note_wait(func: Any, name: str, args: Any, kwargs: dict[str, Any], there: list[bool], asked: list[str]) -> None:
    given = dict(zip([each.name for each in func._schema.arguments], args, strict=False)) | kwargs
    if name in READS:
        waited(name)
    elif name in ("index", "index_put", "index_put_") and any(there):
        places = [place for place in given["indices"] if isinstance(place, Tensor)]
        if any(place.dtype in (torch.bool, torch.uint8) for place in places):
            waited("mask")
        elif any(place.ndim and not isinstance(place, Elsewhere) for place in places):
            waited("places from the host")
    elif name in ("to", "_to_copy", "copy_") and not given.get("non_blocking"):
        if name == "copy_" and there[0] != there[1] or name != "copy_" and asked and asked[0] != (NAME if there[0] else "cpu"):
            waited("copy")


@contextmanager
def elsewhere() -> Iterator[None]:
    """Loads with device=NAME put models there. Products of one shape are of fewer rows than on a real one: they are what a pass costs."""
    stock = load._load_model

    def read(*args: Any) -> Any:
        with _disable_current_modes():  # transformers has uses of its own for the name
            return stock(*args)

    with pytest.MonkeyPatch.context() as patch, Numbers(), Present():
        patch.setattr(load, "_load_model", read)
        patch.setattr(tiled.by_tiles, "__defaults__", (TILE,))
        yield

"""`custom:pkg.mod:Class`: a drafter from a module of yours. It is imported because, and only because, the spec names it.

The class is made with `from_spec(None, {}, site)` if it has that, otherwise with no arguments. docs/add_a_drafter.md shows one.
"""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from collections.abc import Mapping
from typing import Any, ClassVar

from ..errors import DraftproofError, SpecError
from .base import Drafter, Needs, NoOptions, Site

PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
METHODS = {"open": "seq, signals", "propose": "states, budgets, noise", "observe": "states, commits, signals", "close": "state"}


class CustomDrafter(NoOptions):
    """Makes a drafter of the class that a spec names."""

    takes_path: ClassVar[bool] = True

    @classmethod
    def from_spec(cls, path: str | None, options: Mapping[str, int], site: Site) -> Drafter:
        """Raises SpecError saying whether the module, the class or a part of the protocol is missing."""
        check_place(path)
        assert path is not None, "checked"
        kind = _imported(path)
        make = getattr(kind, "from_spec", None)
        if not (_takes(kind, 0) if make is None else _takes(make, 3)):
            raise SpecError(f"drafter custom:{path}: the class cannot be made; expected one that takes no arguments, or that has a class "
                            "method from_spec(path, options, site)")
        try:
            drafter = kind() if make is None else make(None, options, site)
        except DraftproofError:
            raise
        except Exception as error:                       # whatever an author's own lines raise
            raise SpecError(f"drafter custom:{path}: making it raised {type(error).__name__}: {error}{_line(error)}") from error
        _conforms(drafter, f"drafter custom:{path}")
        return drafter      # type: ignore[no-any-return]


def _line(error: Exception) -> str:
    """Where it was raised, for whoever wrote that line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def check_place(path: str | None) -> None:
    """Raises SpecError unless `path` reads pkg.mod:Class."""
    if path is None or not PLACE.fullmatch(path):
        raise SpecError(f"drafter spec custom:{path or ''}: expected custom:pkg.mod:Class, a module that Python can "
                        "import and a class in it; such drafters take no options")


def _imported(path: str) -> Any:
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise SpecError(f"drafter custom:{path}: there is no module {error.name}; expected one that Python can import: install it, "
                            "or put its folder on PYTHONPATH") from error
        raise SpecError(f"drafter custom:{path}: module {module_name} imports {error.name}, which is missing; install it") from error
    except Exception as error:
        raise SpecError(f"drafter custom:{path}: importing {module_name} raised {type(error).__name__}: {error}") from error
    kind = getattr(module, class_name, None)
    if not inspect.isclass(kind):
        known = [name for name, value in vars(module).items() if inspect.isclass(value) and value.__module__ == module.__name__]
        found = "no such name" if kind is None else f"a {type(kind).__name__}"
        raise SpecError(f"drafter custom:{path}: found {found} in {module_name}, expected a class; it has: "
                        f"{', '.join(known) or 'none'}")
    return kind


def _conforms(drafter: Any, who: str) -> None:
    """Raises SpecError naming everything that the protocol asks for and `drafter` lacks."""
    wrong = []
    if not isinstance(getattr(drafter, "name", None), str) or drafter.name in ("", "none"):
        wrong.append(f"name is {getattr(drafter, 'name', None)!r}, expected a text other than none")
    if not isinstance(getattr(drafter, "needs", None), Needs):
        wrong.append(f"needs is {getattr(drafter, 'needs', None)!r}, expected a draftproof.drafters.base.Needs")
    for method, arguments in METHODS.items():
        if not _takes(getattr(drafter, method, None), len(arguments.split(", "))):
            wrong.append(f"expected a method {method}(self, {arguments})")
    if wrong:
        raise SpecError(f"{who}: {'; '.join(wrong)}. The protocol is draftproof.drafters.base.Drafter, and PerSequence has most of it")


def _takes(method: Any, count: int) -> bool:
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:
        return True                      # written in C, without a signature to read
    return True

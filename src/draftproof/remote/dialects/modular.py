"""Modular MAX: flags. Its K counts drafted tokens, as ours does."""

from __future__ import annotations

from ...errors import OptionError
from ..plan import Exported, Plan, one_drafter, refuse

VERSION = "Modular MAX 26"
ABLE = "none, eagle, eagle3, mtp, dflash"
METHODS = {"eagle": "eagle", "eagle3": "eagle", "mtp": "mtp", "dflash": "dflash"}


def export(plan: Plan) -> Exported:
    """The command line. Raises OptionError for a drafter that MAX does not have."""
    one_drafter(plan, "MAX")
    start = ("max", "serve", "--model", plan.target)
    if plan.name == "none" or plan.k == 0:
        return Exported("max", VERSION, (*start, *plan.extra))
    if plan.name not in METHODS:
        raise refuse(plan, "MAX", ABLE)
    if plan.rule == "lossy-typical":
        raise OptionError("rule lossy-typical: MAX's relaxed acceptance is another; export match or ratio")
    weights = () if plan.name == "mtp" and plan.drafter.path is None else ("--draft-model-path", plan.path())
    flags = (*weights, "--speculative-method", METHODS[plan.name], "--num-speculative-tokens", str(plan.k))
    notes = list(plan.general_notes())
    if plan.tree:
        notes.append(f"tree {plan.tree}: chains only; the depth is kept")
    if plan.schedule is not None:
        notes.append("the form of --num-speculative-tokens-per-batch-size is not documented: the largest depth is written")
    if plan.rule == "block":
        notes.append("rule block has no counterpart: MAX verifies by its own rejection sampling")
    return Exported("max", VERSION, (*start, *flags, *plan.extra), notes=tuple(notes))

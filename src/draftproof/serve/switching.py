"""The runtime switch: what an operator may change while the server runs, and how the state is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ..drafters import parse_spec
from ..engine.speculation import NO_CAP
from ..errors import LoadError, SpecError, VocabularyMismatch
from .refusal import Refusal
from .schema import SwitchRequest
from .translate import Served
from .worker import Worker

log = logging.getLogger("draftproof.serve")


async def switched(worker: Worker, served: Served, wanted: SwitchRequest) -> dict[str, Any]:
    """Steer the engine from the next round on; its new state. Raises Refusal, OptionError or SpecError, changing nothing."""
    settings = wanted.model_dump(exclude_none=True)
    if "depth_cap" in wanted.model_fields_set:              # an engine's None leaves the cap as it is
        settings["depth_cap"] = NO_CAP if wanted.depth_cap is None else wanted.depth_cap
    if not settings:
        raise Refusal(400, "nothing to change: expected enabled, depth_cap or drafter")
    if wanted.drafter is not None:
        check_drafter(wanted.drafter, served)
    try:
        return await asyncio.wrap_future(worker.switch(**settings))
    except (LoadError, VocabularyMismatch) as error:         # it may name folders of this machine
        log.warning("drafter %s cannot be had: %s", wanted.drafter, error)
        raise Refusal(400, f"drafter {wanted.drafter!r} cannot be had for this model; the server's log says why", param="drafter") from None


def check_drafter(spec: str, served: Served) -> None:
    """A drafter that comes over the wire may not name files or code, unless the server was started with it."""
    if spec in ("none", served.drafter):
        return
    try:
        parsed = parse_spec(spec)
    except SpecError as error:
        raise Refusal(400, str(error), param="drafter") from None
    for part in parsed.parts or (parsed,):
        if part.path is not None or part.name == "custom":
            raise Refusal(403, f"drafter {spec!r} names files or code; over the wire only {served.drafter!r}, none and drafters by name "
                               "are taken: restart the server with it", "permission_error", param="drafter")


def state_of(state: Mapping[str, Any], served: Served) -> dict[str, Any]:
    return {**state, "enabled": state["state"] == "on", "configured": served.drafter, "model": served.name}

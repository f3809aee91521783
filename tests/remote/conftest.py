from __future__ import annotations

from typing import Any

import pytest

from draftproof.models.load import builtin
from draftproof.models.outline import outline


@pytest.fixture(scope="module")
def target() -> Any:
    """The built-in target as an engine in front of servers knows it."""
    return outline(builtin("target"))

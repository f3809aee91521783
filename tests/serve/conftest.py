"""The server that most tests of the API ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serve.serving import Running, serving, words


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving(words(), "ngram:min=1,max=2", depth=3) as server:
        yield server

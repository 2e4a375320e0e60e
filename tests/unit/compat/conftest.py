"""Exports of these tests start no processes: what is exported does not depend on who writes the rows."""

from collections.abc import Iterator

import pytest

from tests.support.export.in_process import exports_in_this_process


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    with exports_in_this_process():
        yield

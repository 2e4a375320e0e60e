"""Exports without worker processes, for the tests that ask for them: the graphs do not depend on who writes the rows."""

from collections.abc import Iterator

import pytest

from tests.support.export import in_process


@pytest.fixture(scope="module")
def exports_in_this_process() -> Iterator[None]:
    with in_process.exports_in_this_process():
        yield

"""Fixtures that several files of end-to-end tests share. No test changes what they return."""

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vector_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the models that the vectors of requests are written for; returns their folders by name."""
    from tests.support.serving.vector_models import save_models

    return save_models(tmp_path_factory.mktemp("vector_models"))


@pytest.fixture(scope="module")
def exports_in_this_process() -> Iterator[None]:
    """Start no worker processes for exports: for tests of signatures and numbers, which do not depend on who writes the rows."""
    from tests.support.export import in_process

    with in_process.exports_in_this_process():
        yield

"""Fixtures that several files of end-to-end tests share. No test changes what they return."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vector_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save the models that the vectors of requests are written for; returns their folders by name."""
    from tests.support.serving.vector_models import save_models

    return save_models(tmp_path_factory.mktemp("vector_models"))

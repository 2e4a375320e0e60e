"""What several files of end-to-end tests read, and none of them changes."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vector_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models that the vectors of requests are written for."""
    from tests.support.serving.vector_models import save_models

    return save_models(tmp_path_factory.mktemp("vector_models"))

"""The versions that a front and its shards have in common."""

import logging
from typing import Any

import pytest

from tpuembed_serving.core.servable import State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.tf_serving.front import FrontModels


class Side:
    """The models of one side, all loaded."""

    ready = True

    def __init__(self, *versions: int) -> None:
        self.versions = versions

    def labels(self) -> dict[str, Any]:
        return {"shop": {}}

    def statuses(self, name: str) -> list[VersionStatus]:
        return [VersionStatus(version, State.AVAILABLE, None) for version in self.versions if name == "shop"]


def test_a_front_without_a_version_of_the_shards_says_what_both_have(caplog: pytest.LogCaptureFixture) -> None:
    front, shards = Side(4, 3), Side(2, 1)
    given: Any = front, shards
    models = FrontModels(*given)
    text = "no version is on the front and on all shards: the front has 4, 3; the shards have 2, 1. "
    text += "Are their folders of one export?"
    for _ in range(2):
        assert not models.ready
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.WARNING, f"model shop: {text}")]
    with pytest.raises(StatusError) as caught, models.lease("shop", None):
        pass
    assert (caught.value.code, caught.value.message) == (Code.UNAVAILABLE, text)
    with pytest.raises(StatusError, match="Servable not found") as caught, models.lease("other", None):
        pass
    assert caught.value.code is Code.NOT_FOUND
    shards.versions = (4,)
    assert models.ready

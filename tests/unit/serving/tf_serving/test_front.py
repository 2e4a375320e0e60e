"""The versions that a front and its shards have in common."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tpuembed_serving.core.servable import LoadedVersion, State, VersionStatus
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.tf_serving import front as front_module
from tpuembed_serving.tf_serving.front import FrontModels, FrontServable
from tpuembed_serving.tf_serving.proxy import RemoteServable

_ANY: Any = None
FRONT = FrontServable({}, {}, _ANY, RemoteServable({}, {}, "shop", 1), {})


class Side:
    """The models of one side, all loaded."""

    ready = True

    def __init__(self, *versions: int) -> None:
        self.versions = versions
        self.servables: dict[int, Any] = {}

    @contextlib.contextmanager
    def lease(self, name: str, version: int, label: str | None = None) -> Iterator[LoadedVersion]:
        yield LoadedVersion(version, self.servables.setdefault(version, RemoteServable({}, {}, name, version)))

    def labels(self) -> dict[str, Any]:
        return {"shop": {}}

    def statuses(self, name: str) -> list[VersionStatus]:
        return [VersionStatus(version, State.AVAILABLE, None) for version in self.versions if name == "shop"]


def test_a_front_without_a_version_of_the_shards_says_what_both_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
    monkeypatch.setattr(front_module, "_servable", lambda *_: FRONT)
    shards.versions = (4,)
    assert models.ready


def test_a_version_that_goes_in_this_moment_leaves_the_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request failed with NOT_FOUND, and the server said that it was ready."""
    front, shards = Side(2, 1), Side(2, 1)
    given: Any = front, shards
    models, lease = FrontModels(*given), shards.lease

    def without_2(name: str, version: int) -> Any:
        if version == 2:
            raise StatusError(Code.NOT_FOUND, "Servable not found for request: Specific(shop, 2)")
        return lease(name, version)

    monkeypatch.setattr(shards, "lease", without_2)
    monkeypatch.setattr(front_module, "_servable", lambda *_: FRONT)
    with models.lease("shop", None) as loaded:
        assert loaded == LoadedVersion(1, FRONT)
    with pytest.raises(StatusError, match="Servable not found"), models.lease("shop", 2):
        pass


def test_versions_that_do_not_fit_together_are_read_again_and_others_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    front, shards = Side(2, 1), Side(2, 1)
    given: Any = front, shards
    models = FrontModels(*given)
    wrong = {2}

    def servable(_: Any, remote: RemoteServable) -> Any:
        if remote.version in wrong:
            raise StatusError(Code.UNAVAILABLE, "they are of two exports")
        return FRONT

    monkeypatch.setattr(front_module, "_servable", servable)
    with models.lease("shop", None) as loaded:
        assert loaded == LoadedVersion(1, FRONT)
    assert shards.servables[2].is_doubted
    with pytest.raises(StatusError, match="of two exports"), models.lease("shop", 2):
        pass
    assert [(one.version, one.state) for one in models.statuses("shop")] == [(2, State.START), (1, State.AVAILABLE)]
    assert models.ready
    wrong.add(1)
    front.servables.clear()
    assert not models.ready
    assert [record.message for record in caplog.records] == [
        f"model shop version {version} is not served: they are of two exports" for version in (2, 1)
    ]
    with pytest.raises(StatusError, match="of two exports"), models.lease("shop", None):
        pass
    wrong.clear()
    assert models.ready
    with models.lease("shop", None) as loaded:
        assert loaded.version == 2

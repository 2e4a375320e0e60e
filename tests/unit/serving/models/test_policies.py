"""Which versions a policy serves, in which order they come and go, and what labels call them."""

from pathlib import Path

import pytest

from tests.support.messages import refused
from tests.support.serving.doubles import FakeLoader, make_version
from tpuembed.errors import ConfigError
from tpuembed_serving.core.servable import State
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.policies import AllVersions, LatestVersions, SpecificVersions, VersionPolicy
from tpuembed_serving.models.repository import ServedModel
from tpuembed_serving.settings import ModelSettings


def test_policies_that_want_nothing_are_refused() -> None:
    with refused(ConfigError):
        LatestVersions(0)
    with refused(ConfigError):
        SpecificVersions(frozenset())


@pytest.fixture
def loader() -> FakeLoader:
    return FakeLoader()


@pytest.fixture
def base_path(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m"


def settings_of(base_path: Path, policy: VersionPolicy, labels: dict[str, int] | None = None) -> ModelSettings:
    return ModelSettings(name="m", base_path=base_path, policy=policy, labels=labels or {})


def serve(
    base_path: Path,
    loader: FakeLoader,
    policy: VersionPolicy,
    labels: dict[str, int] | None = None,
) -> ServedModel:
    return ServedModel(settings_of(base_path, policy, labels), loader, lambda: None)


def available(model: ServedModel) -> set[int]:
    return {status.version for status in model.statuses() if status.state is State.AVAILABLE}


def labelled(model: ServedModel, label: str) -> int:
    with model.lease(None, label) as loaded:
        return loaded.version


def publish(base_path: Path, *versions: int) -> None:
    for version in versions:
        make_version(base_path, version)


def test_the_latest_two_are_loaded_newest_first(base_path: Path, loader: FakeLoader) -> None:
    publish(base_path, 1, 2, 3)
    model = serve(base_path, loader, LatestVersions(2))
    model.poll()
    assert loader.calls == ["3", "2"]
    publish(base_path, 4)
    seen = []
    loader.during = lambda: seen.append(available(model))
    model.poll()
    assert seen == [{3}], "3 is wanted and answers, so 2 may go before 4 is loaded"
    assert available(model) == {3, 4}
    assert loader.loaded["2"].closed.is_set()


def test_an_old_version_serves_until_one_of_the_wanted_does(base_path: Path, loader: FakeLoader) -> None:
    publish(base_path, 1)
    model = serve(base_path, loader, LatestVersions(2))
    model.poll()
    model.configure(settings_of(base_path, SpecificVersions(frozenset({2, 3}))))
    publish(base_path, 2, 3)
    loader.broken = {"2": StatusError(Code.DATA_LOSS, "torn"), "3": StatusError(Code.DATA_LOSS, "torn")}
    model.poll()
    assert available(model) == {1}
    loader.broken = {"3": StatusError(Code.DATA_LOSS, "torn")}
    (base_path / "2" / "saved_model.pb").write_bytes(b"whole")
    model.poll()
    assert available(model) == {2}
    assert loader.loaded["1"].closed.is_set()


def test_a_specific_version_that_is_not_there_is_named_once(
    base_path: Path, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    publish(base_path, 1)
    model = serve(base_path, loader, SpecificVersions(frozenset({1, 7})))
    with caplog.at_level("WARNING"):
        model.poll()
        model.poll()
    assert caplog.messages == [f"model m: its config names version 7, which is not in {base_path}"]
    assert available(model) == {1}


def test_labels_of_the_first_config_wait_for_their_versions(base_path: Path, loader: FakeLoader) -> None:
    publish(base_path, 1, 2)
    model = serve(base_path, loader, AllVersions(), {"stable": 1, "canary": 2, "next": 3})
    for label in ("stable", "next", "none"):
        with (
            pytest.raises(StatusError, match=f"^Unrecognized servable version label: {label}$") as caught,
            model.lease(None, label),
        ):
            pass
        assert caught.value.code is Code.INVALID_ARGUMENT
    model.poll()
    assert (labelled(model, "stable"), labelled(model, "canary")) == (1, 2)
    with pytest.raises(StatusError, match=r"label: next$"), model.lease(None, "next"):
        pass
    publish(base_path, 3)
    model.poll()
    assert labelled(model, "next") == 3


def test_a_label_of_a_version_that_went_away(base_path: Path, loader: FakeLoader) -> None:
    publish(base_path, 1)
    model = serve(base_path, loader, LatestVersions(), {"stable": 1})
    model.poll()
    publish(base_path, 2)
    model.poll()
    with (
        pytest.raises(StatusError, match=r"^Servable not found for request: Specific\(m, 1\)$"),
        model.lease(None, "stable"),
    ):
        pass

"""A models.config is followed while the server runs; one that is broken changes nothing."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.serving.doubles import wait_for
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.config import read_models
from tpuembed_serving.models.config_file import ConfigFile
from tpuembed_serving.settings import ModelSettings


def write(path: Path, *names: str) -> None:
    models = (f'config {{ name: "{name}" base_path: "/{name}" model_platform: "tensorflow" }}' for name in names)
    path.write_text(f"model_config_list {{ {' '.join(models)} }}", encoding="utf-8")


class Server:
    """Remembers what it was told to serve; raises `error` where there is one."""

    def __init__(self) -> None:
        self.reloads: list[list[str]] = []
        self.error: StatusError | None = None

    def reload(self, models: Sequence[ModelSettings]) -> None:
        self.reloads.append([model.name for model in models])
        if self.error:
            raise self.error


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "models.config", "a")
    return tmp_path / "models.config"


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def config(path: Path, server: Server) -> ConfigFile:
    return ConfigFile(path, read_models(path), 0.01, server.reload)


def test_a_broken_file_is_said_once(
    config: ConfigFile, server: Server, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("model_config_list { confg {} }", encoding="utf-8")
    config.poll()
    config.poll()
    path.unlink()
    config.poll()
    broken, missing = caplog.messages
    assert broken.startswith(
        f"{path}: not applied. The previous config stays in use. config {path}, line 1, column 21: "
    )
    assert "cannot be read: No such file or directory" in missing
    assert server.reloads == []
    write(path, "b")
    config.poll()
    assert server.reloads == [["b"]]


def test_a_file_that_is_being_written_unloads_nothing(
    config: ConfigFile, server: Server, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that writes the file in place truncates it first. TensorFlow Serving keeps its models then, too."""
    for text in ("", "\n# models of the shop\n"):
        path.write_text(text, encoding="utf-8")
        config.poll()
    (refused,) = caplog.messages
    assert refused.endswith(
        f"config {path}: has no model_config_list. To serve no model, write: model_config_list {{}}"
    )
    assert server.reloads == []
    path.write_text("model_config_list {}", encoding="utf-8")
    config.poll()
    assert server.reloads == [[]]
    path.write_text("", encoding="utf-8")
    config.poll()
    assert server.reloads == [[]]


def test_what_the_server_refuses_is_tried_again(
    config: ConfigFile, server: Server, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.error = StatusError(Code.FAILED_PRECONDITION, "label")
    write(path, "b")
    config.poll()
    config.poll()
    assert server.reloads == [["b"], ["b"]]
    assert caplog.messages == [f"{path}: not applied. The previous config stays in use. label"]
    server.error = None
    config.poll()
    config.poll()
    assert server.reloads == [["b"]] * 3


def test_models_that_do_not_load_are_the_servers_to_try_again(
    config: ConfigFile, server: Server, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.error = StatusError(Code.UNKNOWN, "1 model(s) did not become available")
    write(path, "b")
    config.poll()
    config.poll()
    assert server.reloads == [["b"]]
    assert caplog.messages == [f"{path}: applied, but 1 model(s) did not become available"]


def test_it_outlives_what_nobody_expected(config: ConfigFile, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def broken(_: Path) -> tuple[ModelSettings, ...]:
        looks.append(1)
        raise RuntimeError

    monkeypatch.setattr("tpuembed_serving.models.config_file.read_models", broken)
    config.start()
    wait_for(lambda: len(looks) > 1)
    config.stop()
    config._thread.join(60)

"""The models of a server change, by its models.config and by reloads over gRPC, and nothing is without an answer meanwhile."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving.doubles import wait_for
from tests.support.serving.folders import FENCE, Folders, config
from tpuembed_serving.core.status import Code, StatusError

Start = Callable[..., Folders]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Start:
    """A server of version 1 of m, and of `FENCE`. They are in models/, and elsewhere/ is not."""

    def begin(**options: Any) -> Folders:
        caplog.set_level("INFO")
        server = Folders(tmp_path / "models", monkeypatch, ["m"], **options)
        server.publish("m", 1)
        return server

    return begin


def with_fence(server: Folders, *names: str | tuple[str, Path], more: str = "") -> str:
    """A models.config of these models, and of `FENCE`."""
    models = [(name, server.root / name) if isinstance(name, str) else name for name in names]
    return config(*models, (FENCE, server.root / FENCE), more=more)


def test_models_come_and_go(start: Start) -> None:
    with start() as server:
        server.wait_for("m", {1: "AVAILABLE"})
        with server.busy("m") as replies:
            assert server.reload(with_fence(server)) == ("OK", "")
            assert server.states("m") == {1: "UNLOADING"}
            assert not server.loaders["m"].loaded["1"].closed.is_set()
        assert replies[0].status == 200
        wait_for(server.loaders["m"].loaded["1"].closed.is_set)
        assert server.reload(with_fence(server, "m")) == ("OK", "")
        assert server.served("m") == 1


def test_a_reload_names_the_models_that_do_not_load_and_the_others_serve(start: Start) -> None:
    with start() as server:
        server.loaders["n"].broken["7"] = StatusError(Code.DATA_LOSS, "version 7: torn")
        server.publish("n", 7)
        server.publish("o", 9)
        (server.root / "empty").mkdir()
        code, text = server.reload(with_fence(server, "m", "n", "o", "empty", "missing"))
        assert code == "UNKNOWN"
        assert text.startswith("3 model(s) did not become available: {")
        for part in (
            "{name: n version: 7} due to error: DATA_LOSS: version 7: torn}",
            "{name: empty} due to error: NOT_FOUND: No versions",
            f"Could not find base path {server.root / 'missing'} for servable missing",
        ):
            assert part in text
        assert (server.served("m"), server.served("o"), server.states("n")) == (1, 9, {7: "END"})
        text = with_fence(server, "m", "p", more='version_labels { key: "stable" value: 1 }')
        assert server.reload(text)[0] == "FAILED_PRECONDITION", "labels of a new model"


def test_another_folder_serves_once_a_version_of_it_is_loaded(start: Start) -> None:
    with start() as server:
        server.wait_for("m", {1: "AVAILABLE"})
        before, moved, seen = server.loaders["m"].loaded["1"], server.loaders["moved"], list[Any]()
        moved.broken["1"] = StatusError(Code.DATA_LOSS, "torn")
        path = server.publish("moved", 1)
        text = with_fence(server, ("m", path.parent))
        assert "{name: m version: 1} due to error: DATA_LOSS: torn" in server.reload(text)[1]
        assert server.served("m") == 1
        moved.broken.clear()
        moved.during = lambda: seen.append((server.served("m"), before.closed.is_set()))
        (path / "saved_model.pb").write_bytes(b"whole")
        assert server.reload(text) == ("OK", "")
        assert server.served("m") == 1
        assert (moved.calls, seen[-1]) == (["1", "1"], (1, False))
        assert before.closed.is_set()


def test_reloads_at_once_come_one_after_the_other(start: Start) -> None:
    with start() as server:
        for number in range(8):
            server.publish(f"n{number}", number)
        configs = [with_fence(server, "m", f"n{number}") for number in range(8)]
        threads = [threading.Thread(target=server.reload, args=(text,)) for text in configs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum("AVAILABLE" in server.states(f"n{number}").values() for number in range(8)) == 1
        assert server.served("m") == 1


def test_a_stop_ends_a_reload_that_takes_longer(start: Start) -> None:
    loading, go_on, ended = threading.Event(), threading.Event(), list[Any]()
    with start(lame_duck_seconds=0.0, drain_seconds=0.3) as server:

        def block() -> None:
            loading.set()
            assert go_on.wait(60)

        server.loaders["n"].during = block
        server.publish("n", 7, 8)
        thread = threading.Thread(target=lambda: ended.append(server.reload(with_fence(server, "m", "n"))))
        thread.start()
        assert loading.wait(60)
        server.terminate()
        thread.join(60)
        go_on.set()
        server.wait()
    assert [code for code, _ in ended] == ["UNAVAILABLE"]
    assert all(one.closed.is_set() for loader in server.loaders.values() for one in loader.loaded.values())


def test_a_server_without_a_model_is_ready(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    with start() as server:
        assert server.reload("model_config_list {}") == ("OK", "")
        assert server.send("GET", "/readyz").status == 200


def test_a_client_may_name_what_the_operator_has_added_since_the_start(start: Start, tmp_path: Path) -> None:
    """And the operator may take over what a client chose, whose link leads elsewhere by then."""
    file, link = tmp_path / "models.config", tmp_path / "models" / "link"
    elsewhere = tmp_path / "elsewhere" / "n"
    for version, path in ((2, elsewhere), (5, tmp_path / "far" / "x")):
        (path / str(version)).mkdir(parents=True)
        (path / str(version) / "saved_model.pb").write_bytes(b"graph")
    with start(config_file=file, config_poll_seconds=0.02) as server:
        link.symlink_to(server.root / "m")
        text = with_fence(server, "m", ("n", elsewhere))
        assert server.reload(text)[0] == "PERMISSION_DENIED"
        file.write_text(text)
        wait_for(lambda: server.served("n") == 2)
        assert server.reload(text) == ("OK", "")
        chosen = with_fence(server, "m", ("chosen", link))
        assert server.reload(chosen) == ("OK", "")
        link.unlink()
        link.symlink_to(tmp_path / "far" / "x")
        wait_for(lambda: server.states("chosen") == {5: "END", 1: "AVAILABLE"})
        assert server.error("chosen", 5)[0] == "PERMISSION_DENIED"
        file.write_text(chosen)
        wait_for(lambda: server.served("chosen") == 5)


def test_a_link_of_the_operators_may_lead_elsewhere_later(start: Start, tmp_path: Path) -> None:
    server = start()
    link = server.root / "m"
    link.rename(tmp_path / "first")
    link.symlink_to(tmp_path / "first")
    (tmp_path / "second" / "2").mkdir(parents=True)
    (tmp_path / "second" / "2" / "saved_model.pb").write_bytes(b"graph")
    with server:
        assert server.reload(with_fence(server, "m")) == ("OK", "")
        link.unlink()
        link.symlink_to(tmp_path / "second")
        wait_for(lambda: server.served("m") == 2)


def test_the_config_file_is_followed(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is wrong is logged once and changes nothing. What the server refuses is tried again."""
    file = tmp_path / "models.config"
    with start(config_file=file, config_poll_seconds=0.02) as server:

        def logged(text: str) -> None:
            wait_for(lambda: any(message.startswith(f"{file}: {text}") for message in caplog.messages))

        not_applied = "not applied. The previous config stays in use. "
        logged(f"{not_applied}config {file}: cannot be read: No such file or directory")
        file.write_text("model_config_list { confg {} }")
        logged(f"{not_applied}config {file}, line 1, column 21: ")
        # A program that writes the file in place truncates it first. TensorFlow Serving keeps its models then, too.
        file.write_text("")
        logged(
            f"{not_applied}config {file}: has no model_config_list. To serve no model, write: model_config_list {{}}"
        )
        assert server.served("m") == 1
        labelled = f"{with_fence(server, 'm', more='model_version_policy { all {} }')[:-1]}"
        labelled = labelled.replace('name: "m"', 'name: "m" version_labels { key: "stable" value: 9 }') + "}"
        file.write_text(labelled)
        logged(f"{not_applied}Request to assign label to version 9 of model m, which is not currently available")
        assert server.served("m/labels/stable") == "Unrecognized servable version label: stable"
        server.publish("m", 9)
        server.wait_for("m", {9: "AVAILABLE"})
        wait_for(lambda: server.served("m/labels/stable") == 9)
        server.loaders["n"].broken["7"] = StatusError(Code.DATA_LOSS, "torn")
        server.publish("n", 7)
        file.write_text(with_fence(server, "n"))
        logged("applied, but 1 model(s) did not become available: {{{name: n version: 7} due to error: ")
        file.write_text("model_config_list {}")
        wait_for(lambda: server.served("m") == "Servable not found for request: Latest(m)")
        warnings = [message for message in caplog.messages if message.startswith(f"{file}: ") and "but" in message]
        assert len(warnings) == 1
        refused = [message for message in caplog.messages if f"{file}: not applied" in message]
        assert len(refused) == len(set(refused)) == 4
